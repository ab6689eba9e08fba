"""SWA pools: full-attention layers and sliding-window layers keep their KV in two pools, two slot spaces.

The window. W = `ModelRunner.sliding_window_size` is what every part of SGLang 0.5.12.post1 counts with: a query at
position q reads the keys at positions k with q - k <= W (models whose config counts the token itself hand out
config.sliding_window - 1). The first new token of a forward, at p, thus reads [p - W, p), and later tokens of the
forward read less of the prefix:
- extend and target verify, triton: the prefix buffer holds the last min(p, W) tokens, and the mask is q <= k + W;
- decode, triton: the last min(p + 1, W) tokens with the new one, so W - 1 of the prefix, one less than the rest;
- flashinfer: the last W + 1 tokens with the new one; flashattention: window (W, 0), which is inclusive.
  Chunked attention (Llama 4) sets W to the chunk size and reads no more than that.
`window = W` is therefore all that any of them reads, and all that SGLang promises to keep:
- SWARadixCache matches only prefixes with W tokens since the last tombstone, and locks W tokens back from the match;
  what lies before them may become a tombstone at any time. W + 1 would be a false alarm.
- `ScheduleBatch._evict_swa` frees positions below n - W - page_size, rounded down to a page. n = req.seqlen - 1 is the
  new token's position; with overlap scheduling, where the running forward's result has not been appended yet, it
  is the first new position of the running forward, speculative or not. Either way the forward that reads from
  n - W on keeps a margin of at least page_size slots. A chunk cache evicts on extend as well: with overlap from the
  third chunk on, counted from one chunk earlier, which is where the running forward began, or before it.
- Where the margin is zero: chunked prefill over a SWARadixCache with overlap. When chunk i + 1 is scheduled, chunk
  i is put into the tree and the lock moves to its end, while chunk i, whose window starts before it, may not have run
  yet. Under SWA pressure those slots can be evicted, and mapping value 0 then appears under the queued forward.
  If that happens before the attention backend translates its indices, the layer reads the padding slot, which is a
  true alarm; if after, the bytes are still in place (the slots are rewritten by a later forward only), which is none.
  SGLANG_OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW (off by default) has no margin either: it unlocks the prompt while the
  running forward still reads its last position.
"""

from __future__ import annotations

from typing import Any

from ...buffer_group import PoolKind
from ..attachment import KV_BUF_INFOS, STATE_BUF_INFOS, AttachOptions, PoolAttachment
from .sub_pool import as_swa, attach_sub_pool, sliding_window_of


def attach_swa(pool: Any, options: AttachOptions) -> PoolAttachment:
    """FULL over `full_kv_pool` and SWA over `swa_kv_pool`; a sub-pool without layers or slots gives no group.

    `options.sliding_window_size` is needed where there is a SWA group, and so is the mapping, which the
    allocator registers with the pool. SWA records are named in `get_state_buf_infos`.
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
