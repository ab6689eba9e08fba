"""MHA pools: one K and one V buffer per layer, one row per slot."""

from __future__ import annotations

from typing import Any

from ...buffer_group import ContentSource
from ..attachment import KV_BUF_INFOS, AttachOptions, PoolAttachment
from ..content_layout import interleaved_sources, row_sources
from ..errors import UnsupportedPoolError
from ..group_builder import build_group, splice_halves
from ..layers import layer_buffers, scale_buffers

# 0.5.12.post1 names no layout: it has the first one only.
_LAYOUTS = ("nhd", "page_major_layer_major")


def attach_mha(pool: Any, options: AttachOptions) -> PoolAttachment:
    """One group with K and V over `size + page_size` slots. Scales of FP4 and MXFP8 pools are content as well.

    A pool without layers or slots gives no group. A pool that lacks a layer's buffer is refused.
    """
    layers = pool.layer_num
    if not layers or pool.size <= 0:
        return PoolAttachment()
    num_slots = pool.size + pool.page_size
    # Laid out even without content: this refuses a pool with another index space.
    content = mha_content(pool, num_slots)
    group = build_group(options.kind, num_slots, pool.device, options, *content)
    return PoolAttachment((group,), {KV_BUF_INFOS: splice_halves(group, layers, pool.page_size)})


def mha_content(
    pool: Any, num_slots: int
) -> tuple[tuple[ContentSource, ...], tuple[ContentSource, ...]]:
    """Content sources of K and of V. Raises UnsupportedPoolError for a layout in which slots have no rows."""
    _refuse_other_layouts(pool)
    return _content(pool, "k", num_slots), _content(pool, "v", num_slots)


def _refuse_other_layouts(pool: Any) -> None:
    """Where tokens are not the rows of a buffer, its shape may still look as if they were."""
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout not in _LAYOUTS:
        raise UnsupportedPoolError(
            f"{type(pool).__name__} keeps K and V in the layout {layout}, whose pages are split by heads before "
            "tokens; unset SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
        )
    if getattr(pool, "native_k_scale_buffer", None) is not None:
        raise UnsupportedPoolError(
            f"{type(pool).__name__} keeps scales in native_k_scale_buffer, whose pages are split by heads before "
            "tokens; serve with another --kv-cache-dtype than nvfp4"
        )


def _content(pool: Any, half: str, num_slots: int) -> tuple[ContentSource, ...]:
    data, scales = (
        layer_buffers(pool, f"{half}_buffer"),
        scale_buffers(pool, f"{half}_scale_buffer"),
    )
    if getattr(pool, "mxfp8_sf_interleaved", False):
        interleaved = interleaved_sources(scales, num_slots, pool.page_size)
        return row_sources(data, num_slots, pool.page_size) + interleaved
    return row_sources(data + scales, num_slots, pool.page_size)
