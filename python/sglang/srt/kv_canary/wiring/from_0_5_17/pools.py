"""The pools that are covered. Others, also subclasses of these, keep K and V in a layout of their own."""

from __future__ import annotations

__all__ = ["POOLS", "SUB_POOLS"]

POOLS = (
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
    "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool",
)

# The pools inside of a SWAKVPool.
SUB_POOLS = ("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",)
