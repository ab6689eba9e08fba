"""Commands of `python -m sglang.srt.kv_canary`, one file each."""
