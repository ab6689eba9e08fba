"""Hooks on speculative decoding: EAGLE, EAGLE3, STANDALONE, FROZEN_KV_MTP and NGRAM, all of them v2."""

from __future__ import annotations

from ..hook_spec import HookSpec, HookType
from ..sampled_tokens import SAMPLED, after_verify_v2
from ..speculative import draft_hooks

# FOLLOWED_MOVES. DSATokenToKVPool calls its base class, MLATokenToKVPool.
_POOLS = (
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
    "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool",
)
HOOKS = (
    *draft_hooks("execute", _POOLS),
    HookSpec(
        "sglang.srt.speculative.eagle_utils.eagle_sample",
        after_verify_v2,
        HookType.AFTER,
        SAMPLED,
    ),
)
