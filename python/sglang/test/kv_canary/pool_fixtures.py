"""Builds SGLang's real KV pools, small, with their real allocators, on any device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class RealPool(NamedTuple):
    """A pool and the allocator that hands out its slots."""

    pool: Any  # a KVCache
    allocator: Any  # its token_to_kv_pool_allocator


def make_mha_pool(
    size: int = 64,
    page_size: int = 1,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    head_num: int = 2,
    head_dim: int = 8,
    v_head_dim: int | None = None,
    start_layer: int = 0,
    device: str = "cpu",
    pool_class: type | None = None,
) -> RealPool:
    """MHATokenToKVPool (or `pool_class`) of `size` + `page_size` slots."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = (pool_class or MHATokenToKVPool)(
        size=size,
        page_size=page_size,
        dtype=dtype,
        head_num=head_num,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        layer_num=layers,
        device=device,
        enable_memory_saver=False,
        start_layer=start_layer,
        end_layer=start_layer + layers,
    )
    return RealPool(pool, make_allocator(pool))


def make_allocator(pool: Any) -> Any:
    """The allocator that SGLang uses for a pool with one slot space: token-wise, or paged."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    if pool.page_size == 1:
        return TokenToKVPoolAllocator(pool.size, pool.dtype, pool.device, pool, need_sort=False)
    return PagedTokenToKVPoolAllocator(
        pool.size, pool.page_size, pool.dtype, pool.device, pool, need_sort=False
    )
