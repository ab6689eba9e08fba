"""SWA pools: full-attention layers and sliding-window layers keep KV in two pools with two slot spaces.

The window. Every part of SGLang 0.5.12.post1 counts with W = `ModelRunner.sliding_window_size`. A query at position q
reads the keys at positions k with q - k <= W. (If a model's config counts the token itself, W is
config.sliding_window - 1.) So the first new token of a forward, at p, reads [p - W, p). Later tokens of the forward
read less of the prefix:
- extend and target verify, triton: the prefix buffer holds the last min(p, W) tokens, and the mask is q <= k + W;
- decode, triton: the last min(p + 1, W) tokens including the new one. That is W - 1 of the prefix, one less than above;
- flashinfer: the last W + 1 tokens including the new one;
- flashattention: window (W, 0), which is inclusive.
  Chunked attention (Llama 4) sets W to the chunk size and reads no more than that.
So `window = W` covers all that any backend reads, and all that SGLang promises to keep:
- SWARadixCache matches only prefixes with W tokens since the last tombstone, and locks W tokens back from the match.
  Earlier tokens may become a tombstone at any time. A window of W + 1 would raise false alarms.
- `ScheduleBatch._evict_swa` frees positions below n - W - page_size, rounded down to a page. n = req.seqlen - 1 is the
  new token's position. With overlap scheduling, the running forward's result has not been appended yet. Then n is the
  first new position of the running forward, speculative or not. In both cases the forward that reads from n - W on
  keeps a margin of at least page_size slots.
- A chunk cache evicts on extend as well. With overlap it starts at the third chunk, and counts from one chunk earlier.
  That is where the running forward began, or before it.
- The margin is zero for chunked prefill over a SWARadixCache with overlap. When chunk i + 1 is scheduled, chunk i
  enters the tree and the lock moves to its end. Chunk i, whose window starts earlier, may not have run yet. Under SWA
  pressure its slots can be evicted, and mapping value 0 appears under the queued forward. If the attention backend
  has not translated its indices yet, the layer reads the padding slot. This is a true alarm. If it has, the bytes are
  still in place, because only a later forward rewrites the slots. This is no alarm.
  SGLANG_OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW (off by default) has no margin either. It unlocks the prompt while the
  running forward still reads its last position.

SGLang 0.5.17, 0.5.22 and 0.5.23 count with the same W. They evict below n - W, without a margin, and only every
SGLANG_SWA_EVICTION_INTERVAL tokens. 0.5.17 keeps a page if that is more than W. The forward that reads from n - W on
still finds all of it.
"""

from __future__ import annotations

from typing import Any

from ...pool_kind import PoolKind
from ..attachment import KV_BUF_INFOS, STATE_BUF_INFOS, AttachOptions, PoolAttachment
from .sub_pool import as_swa, attach_sub_pool, sliding_window_of


def attach_swa(pool: Any, options: AttachOptions) -> PoolAttachment:
    """FULL over `full_kv_pool` and SWA over `swa_kv_pool`. A sub-pool without layers or slots gives no group.

    A SWA group needs `options.sliding_window_size` and the mapping, which the allocator registers with the pool.
    `get_state_buf_infos` lists the SWA records.
    """
    full = attach_sub_pool(pool, "full_kv_pool", options, PoolKind.FULL)
    swa = attach_sub_pool(pool, "swa_kv_pool", options, PoolKind.SWA)
    swa_groups = tuple(
        as_swa(pool, group, sliding_window_of(pool, options)) for group in swa.groups
    )
    splices = {
        KV_BUF_INFOS: full.splices.get(KV_BUF_INFOS, ()),
        STATE_BUF_INFOS: swa.splices.get(KV_BUF_INFOS, ()),
    }
    return PoolAttachment(full.groups + swa_groups, {m: s for m, s in splices.items() if s})
