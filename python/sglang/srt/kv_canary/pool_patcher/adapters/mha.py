"""MHA pools: one K and one V buffer per layer, one row per slot."""

from __future__ import annotations

from typing import Any

from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup, ContentSource
from sglang.srt.kv_canary.pool_patcher.attachment import KV_BUF_INFOS, AttachOptions, PoolAttachment
from sglang.srt.kv_canary.pool_patcher.buf_info_splice import BufInfoSplice
from sglang.srt.kv_canary.pool_patcher.buffer_allocation import alloc_canary_buf
from sglang.srt.kv_canary.pool_patcher.content_layout import row_sources


def attach_mha(pool: Any, options: AttachOptions) -> PoolAttachment:
    """One group with K and V over `size + page_size` slots; the FP4 pool's scales are content as well.

    A pool without layers or slots gives no group.
    """
    layers = len(pool.k_buffer)
    if not layers or pool.size <= 0:
        return PoolAttachment()
    num_slots = pool.size + pool.page_size
    k_content = _content(pool, "k", num_slots)  # also checks that the pool has the expected layout
    v_content = _content(pool, "v", num_slots)
    buffers = [alloc_canary_buf(num_slots, pool.device) for _ in range(4)]
    k_head, k_tail, v_head, v_tail = buffers
    group = CanaryBufferGroup(
        options.kind,
        k_head,
        k_tail,
        v_head,
        v_tail,
        kv_token_id_vs_position_offset=options.token_offset,
        k_content=k_content if options.content else (),
        v_content=v_content if options.content else (),
    )
    splices = (
        BufInfoSplice(0, layers, k_head, k_tail),
        BufInfoSplice(layers, 2 * layers, v_head, v_tail),
    )
    return PoolAttachment((group,), {KV_BUF_INFOS: splices})


def _content(pool: Any, half: str, num_slots: int) -> tuple[ContentSource, ...]:
    buffers = list(getattr(pool, f"{half}_buffer"))
    buffers += list(getattr(pool, f"{half}_scale_buffer", ()))
    return row_sources(buffers, num_slots, pool.page_size)
