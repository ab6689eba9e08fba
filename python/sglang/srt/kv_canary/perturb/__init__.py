"""Fault injection: damages the KV state of a running engine on purpose, so that its checks can be seen to fire.

Active only when SGLANG_KV_CANARY_PERTURB_DIR names a control folder; tests and the demo set it.
"""
