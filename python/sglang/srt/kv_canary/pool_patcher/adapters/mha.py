"""MHA pools: one K and one V buffer per layer, one row per slot."""

from __future__ import annotations

from typing import Any

from ...buffer_group import ContentSource
from ..attachment import KV_BUF_INFOS, AttachOptions, PoolAttachment
from ..content_layout import row_sources
from ..group_builder import build_group, splice_halves
from ..layers import layer_buffers, scale_buffers


def attach_mha(pool: Any, options: AttachOptions) -> PoolAttachment:
    """One group with K and V over `size + page_size` slots. Scales of an FP4 pool are content as well.

    A pool without layers or slots gives no group. A pool that lacks a layer's buffer is refused.
    """
    layers = pool.layer_num
    if not layers or pool.size <= 0:
        return PoolAttachment()
    num_slots = pool.size + pool.page_size
    # Laid out even without content: this refuses a pool with another index space.
    content = [_content(pool, half, num_slots) for half in ("k", "v")]
    group = build_group(options.kind, num_slots, pool.device, options, *content)
    return PoolAttachment((group,), {KV_BUF_INFOS: splice_halves(group, layers, pool.page_size)})


def _content(pool: Any, half: str, num_slots: int) -> tuple[ContentSource, ...]:
    buffers = layer_buffers(pool, f"{half}_buffer") + scale_buffers(pool, f"{half}_scale_buffer")
    return row_sources(buffers, num_slots, pool.page_size)
