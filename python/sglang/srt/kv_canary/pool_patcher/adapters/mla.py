"""MLA pools: K and V of a layer are one latent row per slot, so there is only a K half."""

from __future__ import annotations

from typing import Any

from ..attachment import KV_BUF_INFOS, AttachOptions, PoolAttachment
from ..content_layout import row_sources
from ..group_builder import build_group, splice_halves
from ..layers import layer_buffers, scale_buffers


def attach_mla(pool: Any, options: AttachOptions) -> PoolAttachment:
    """One K-only group over `size + page_size` slots. Scales of an FP4 pool are content as well.

    A pool without layers or slots gives no group. A pool that lacks a layer's buffer is refused.
    """
    layers = pool.layer_num
    if not layers or pool.size <= 0:
        return PoolAttachment()
    num_slots = pool.size + pool.page_size
    buffers = layer_buffers(pool, "kv_buffer") + scale_buffers(pool, "kv_scale_buffer")
    content = row_sources(buffers, num_slots, pool.page_size)
    group = build_group(options.kind, num_slots, pool.device, options, content)
    return PoolAttachment((group,), {KV_BUF_INFOS: splice_halves(group, layers, pool.page_size)})
