"""Hooks on speculative decoding: EAGLE, EAGLE3 and STANDALONE, all of them v2.

With top-k above 1, a verify moves the accepted tokens' K and V to the front of each request's new slots, also with
pages of one token. The row keeps its slots. Draft-extend then writes all of them in the draft pool.
"""

from __future__ import annotations

from ..hook_spec import HookSpec, HookType
from ..sampled_tokens import SAMPLED, after_verify_v2
from ..speculative import draft_hooks

_POOLS = (
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
    "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool",
)
# DSA pools call their base class, MLATokenToKVPool. Subclasses with moves of their own are not followed.
FOLLOWED = (*_POOLS, "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool")
HOOKS = (
    *draft_hooks("execute", _POOLS),
    HookSpec(
        "sglang.srt.speculative.eagle_utils.eagle_sample",
        after_verify_v2,
        HookType.AFTER,
        SAMPLED,
    ),
)
