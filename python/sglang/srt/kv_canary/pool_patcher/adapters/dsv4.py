"""DeepSeek-V4's pool: sliding-window rows for every layer, and compressed rows for some of them.

There is no full pool: `req_to_token` holds full slots. The c4 and c128 rows of a token are full slot // 4 and // 128,
written when position % stride is stride - 1. SWA rows are found through the mapping. A row is 584 bytes, in two places
of its page. These are [page_size x (448 FP8 nope + 128 BF16 rope)], then [page_size x (7 scales + 1 pad)]. Pages are
padded to a multiple of 576 bytes.

The last token of a compressed slot writes it, in the forward in which that token is new. All tokens of the slot lie
in one page, because pages are multiples of 128 tokens. The backend reads compressed slots through `page_table`. It
makes that table from the row's entry at the first token of each page.

Newer releases have further layouts of a row. With `--dsv4-attn-backend trtllm` it is 512 FP8 bytes. V4.1's layouts have
other parts, or a row in one place. Refused are the compression ratios 1 and 2, and sliding-window rows that belong to a
request: ROCm's unified rows, request windows and rings, which are overwritten in place.

Not covered: the compression state rings (`compress_state_pools`, `indexer_compress_state_pools`). Later tokens
overwrite a ring row in place, and it has no slot per token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...buffer_group import CanaryBufferGroup
from ...pool_kind import PoolKind
from ..attachment import KV_BUF_INFOS, STATE_BUF_INFOS, AttachOptions, PoolAttachment
from ..content_layout import page_sources
from ..errors import UnsupportedPoolError
from ..group_builder import build_group, splice_halves
from ..layers import layer_buffers
from .indexer_layout import indexer_content
from .sub_pool import as_swa, attach_sub_pool, sliding_window_of

ATTENTION_WINDOW = (
    128  # tokens that the backend reads, including the new one (SWA_WINDOW of its module)
)
STRIDES = {PoolKind.C4: 4, PoolKind.C4_INDEXER: 4, PoolKind.C128: 128}  # tokens per slot
_COMPRESSED = (  # in the order of get_contiguous_buf_infos
    ("c4_kv_pool", PoolKind.C4),
    ("c4_indexer_kv_pool", PoolKind.C4_INDEXER),
    ("c128_kv_pool", PoolKind.C128),
)


_IN_PLACE = "sliding-window rows belong to a request and are overwritten in place"
_OTHER_STORAGE = {
    "unified_kv_pool": f"{_IN_PLACE}, in one buffer with compressed rows (ROCm)",
    "request_window": _IN_PLACE,
    "swa_req_ring_size": _IN_PLACE,
}


def attach_dsv4(pool: Any, options: AttachOptions) -> PoolAttachment:
    """Groups SWA, C4, C4_INDEXER and C128, each K-only. Sub-pools without layers or slots give no group.

    A SWA group needs `options.sliding_window_size` and the mapping. The whole pool is refused if a sub-pool is missing,
    or if the c4 pool is HiSparse. Compressed rows without SWA rows are refused as well: they use the SWA rows' chains.
    """
    _refuse_other_storage(pool)
    groups, kv_splices, state_splices, listed = [], [], [], 0
    for group in attach_sub_pool(pool, "swa_kv_pool", options, PoolKind.SWA).groups:
        # SGLang keeps sliding_window_size tokens. The backend reads 127 of them and the new one.
        window = min(sliding_window_of(pool, options), ATTENTION_WINDOW - 1)
        groups.append(as_swa(pool, group, window))
        state_splices += _splices(pool.swa_kv_pool, group, 0)
    base = groups[0] if groups else None
    for attribute, kind in _COMPRESSED:
        if getattr(pool, attribute, None) is None and STRIDES[kind] not in pool.compression_ratios:
            continue  # newer releases build no pool for a ratio that the model lacks
        for group in attach_sub_pool(pool, attribute, options, kind).groups:
            groups.append(_as_strided(pool, group, base))
            kv_splices += _splices(getattr(pool, attribute), group, listed)
        listed += getattr(pool, attribute).layer_num
    splices = {KV_BUF_INFOS: tuple(kv_splices), STATE_BUF_INFOS: tuple(state_splices)}
    return PoolAttachment(tuple(groups), {m: s for m, s in splices.items() if s})


def _refuse_other_storage(pool: Any) -> None:
    name = type(pool).__name__
    others = sorted(set(pool.compression_ratios) - {0, *STRIDES.values()})
    if others:
        raise UnsupportedPoolError(
            f"{name} has layers with the compression ratios {others} (DeepSeek-V4.1), expected 0, 4 and 128"
        )
    for attribute, what in _OTHER_STORAGE.items():
        if getattr(pool, attribute, None):
            raise UnsupportedPoolError(f"{name}.{attribute}: {what}")


def attach_dsv4_rows(pool: Any, options: AttachOptions) -> PoolAttachment:
    """One group over a DeepSeekV4SingleKVPool (SWA, c4 or c128, as `options.kind` says)."""
    if not pool.layer_num or pool.size <= 0:
        return PoolAttachment()
    buffers = layer_buffers(pool, "kv_buffer")
    num_slots, content = page_sources(buffers, pool.page_size, _parts_of(pool))
    return PoolAttachment((_group(pool, options, num_slots, content),))


def _parts_of(pool: Any) -> tuple[int, ...]:
    """Bytes of the pieces of a row, which lie in different places of its page: values, and their scales."""
    total, layout = pool.kv_cache_total_dim, getattr(pool, "kv_layout", None)
    if layout is None:  # until 0.5.20
        values = pool.qk_nope_head_dim + pool.qk_rope_head_dim * pool.rope_storage_dtype.itemsize
    else:
        interleaved = getattr(layout, "is_interleaved", False)  # from 0.5.23 on
        values = total if interleaved else layout.data_bytes
    # Uniform FP8 rows have no scales.
    return (values, total - values) if total > values else (total,)


def attach_dsv4_indexer(pool: Any, options: AttachOptions) -> PoolAttachment:
    """One group over a DeepSeekV4IndexerPool."""
    if not pool.layer_num or pool.size <= 0:
        return PoolAttachment()
    num_slots, content = indexer_content(pool)
    return PoolAttachment((_group(pool, options, num_slots, content),))


def _group(pool: Any, options: AttachOptions, num_slots: int, content) -> CanaryBufferGroup:
    return build_group(options.kind, num_slots, pool.device, options, content)


def _as_strided(
    pool: Any, group: CanaryBufferGroup, base: CanaryBufferGroup | None
) -> CanaryBufferGroup:
    stride = STRIDES[group.kind]
    if base is None:
        raise UnsupportedPoolError(
            f"{type(pool).__name__} has {group.kind.value} slots and no SWA slots on this rank, so nothing shows "
            f"which {stride} tokens a {group.kind.value} slot stands for"
        )
    if pool.page_size % stride:
        raise UnsupportedPoolError(
            f"{type(pool).__name__}: expected pages of a multiple of {stride} tokens, because the tokens of a "
            f"{group.kind.value} slot must lie in one page, got {pool.page_size}"
        )
    return dataclasses.replace(group, stride=stride, chain_base=base)


def _splices(sub_pool: Any, group: CanaryBufferGroup, start: int):
    return splice_halves(group, sub_pool.layer_num, sub_pool.page_size, start)
