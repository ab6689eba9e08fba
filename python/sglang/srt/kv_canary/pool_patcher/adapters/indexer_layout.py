"""Page layout of sparse-attention indexers: all keys of a page (FP8 or FP4), then all their scales."""

from __future__ import annotations

from typing import Any

from ...buffer_group import ContentSource
from ..content_layout import page_sources
from ..errors import UnsupportedPoolError
from ..layers import layer_buffers

PAGES = "index_k_with_scale_buffer"  # of device pools and host pools


def indexer_content(pool: Any) -> tuple[int, tuple[ContentSource, ...]]:
    """(slots, content sources) of `pool.index_k_with_scale_buffer`, uint8 `[num_pages, page bytes]` per layer.

    Layers without pages share the indexer of another layer and are left out.
    """
    refuse_preshuffled_pages(pool.page_size)
    buffers = layer_buffers(pool, PAGES)
    buffers = [buffer for buffer in buffers if buffer.shape[0]] or buffers[:1]
    return page_sources(buffers, pool.page_size, _bytes_of_a_key(pool))


def host_indexer_content(host: Any, pool: Any) -> tuple[ContentSource, ...]:
    """Content sources of the pages that HiCache's `host` has of the indexer's of `pool`: of the same layers, in order.

    A host page is that of the device, byte for byte. Raises UnsupportedPoolError if its layers are not those.
    """
    buffers = layer_buffers(pool, PAGES)
    with_keys = [layer for layer, buffer in enumerate(buffers) if buffer.shape[0]]
    places = getattr(host, "_device_to_host_layer", None)  # from 0.5.22 on: of layers with keys
    if places is None:
        if len(with_keys) != len(buffers):
            raise UnsupportedPoolError(
                f"{type(host).__name__} copies the indexer's pages of all {len(buffers)} layers, of which "
                f"{len(with_keys)} have any: SGLang itself copies beyond its buffers"
            )
        places = {layer: layer for layer in with_keys}
    if missing := [layer for layer in with_keys if layer not in places]:
        raise UnsupportedPoolError(
            f"{type(host).__name__} has no indexer's pages of the layers {missing}"
        )
    pages, is_by_layer = getattr(host, PAGES), host.layout == "layer_first"
    layers = [places[layer] for layer in with_keys]
    of_layers = [pages[layer] if is_by_layer else pages[:, layer, 0] for layer in layers]
    return page_sources(of_layers, host.page_size, _bytes_of_a_key(pool))[1]


def _bytes_of_a_key(pool: Any) -> tuple[int, int]:
    """(values, scales) of one token."""
    if getattr(pool, "use_fp4_indexer", False):  # DeepSeek-V4; scales are one byte per 32 values
        return pool.index_head_dim // 2, pool.index_head_dim // 32
    return pool.index_head_dim, pool.index_head_dim // pool.quant_block_size * 4  # FP32


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
