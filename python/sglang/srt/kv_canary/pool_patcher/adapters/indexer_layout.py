"""Page layout of sparse-attention indexers: all keys of a page (FP8 or FP4), then all their scales."""

from __future__ import annotations

from typing import Any

from ...buffer_group import ContentSource
from ..content_layout import page_sources
from ..errors import UnsupportedPoolError
from ..layers import layer_buffers


def indexer_content(pool: Any) -> tuple[int, tuple[ContentSource, ...]]:
    """(slots, content sources) of `pool.index_k_with_scale_buffer`, uint8 `[num_pages, page bytes]` per layer.

    Layers without pages share the indexer of another layer and are left out.
    """
    refuse_preshuffled_pages(pool.page_size)
    key_bytes = pool.index_head_dim
    scale_bytes = pool.index_head_dim // pool.quant_block_size * 4  # FP32
    if getattr(pool, "use_fp4_indexer", False):  # DeepSeek-V4; scales are one byte per 32 values
        key_bytes, scale_bytes = pool.index_head_dim // 2, pool.index_head_dim // 32
    buffers = layer_buffers(pool, "index_k_with_scale_buffer")
    buffers = [buffer for buffer in buffers if buffer.shape[0]] or buffers[:1]
    return page_sources(buffers, pool.page_size, (key_bytes, scale_bytes))


def refuse_preshuffled_pages(page_size: int) -> None:
    """ROCm's preshuffled pages interleave the keys of 16 tokens: no token has a row of its own."""
    from sglang.srt.utils import is_hip

    if is_hip() and page_size > 1 and _are_preshuffled():
        raise UnsupportedPoolError(
            "the indexer's pages are preshuffled (ROCm, aiter), which is not covered yet"
        )


def _are_preshuffled() -> bool:
    try:
        from sglang.srt.layers.attention.dsa.utils import aiter_can_use_preshuffle_paged_mqa
    except ModuleNotFoundError:  # until 0.5.12.post1
        from sglang.srt.layers.attention.nsa.utils import aiter_can_use_preshuffle_paged_mqa
    return aiter_can_use_preshuffle_paged_mqa()
