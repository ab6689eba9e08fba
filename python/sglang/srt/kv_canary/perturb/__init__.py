"""Fault injection: deliberately damages the KV state of a running engine, to see that its checks report it.

Active only when SGLANG_KV_CANARY_PERTURB_DIR names a control folder; tests and the demo set it.
"""
