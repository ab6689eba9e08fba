"""MiniMax M3's pool: K and V of every layer in an MHA pool, and the indexer's rows of the sparse layers beside it.

All parts have one slot space, and a token's rows are written in the forward in which the token is new. Sparse layers
whose indexer reads no values keep keys only, in a pool of their own.
"""

from __future__ import annotations

from typing import Any

from ...buffer_group import ContentSource
from ...pool_kind import PoolKind
from ..attachment import AttachOptions, PoolAttachment
from ..content_layout import row_sources
from ..errors import UnsupportedPoolError
from ..group_builder import build_group
from ..layers import layer_buffers
from .mha import mha_content
from .sub_pool import attach_sub_pool


def attach_minimax_sparse(pool: Any, options: AttachOptions) -> PoolAttachment:
    """FULL over `main_pool`, and INDEXER over the index pools. A stage without sparse layers has no INDEXER group.

    INDEXER has a V half if a layer keeps index values. Raises UnsupportedPoolError for a HiSparse pool.
    """
    if getattr(pool, "dense_pool", None) is not None or getattr(pool, "_enable_hisparse", False):
        raise UnsupportedPoolError(
            f"{type(pool).__name__}: HiSparse swaps rows between host and device; turn HiSparse off"
        )
    main = attach_sub_pool(pool, "main_pool", options, PoolKind.FULL)
    with_values, keys_only = pool.index_kv_pool, pool.index_k_pool
    if not main.groups or (with_values is None and keys_only is None):
        return main
    num_slots = main.groups[0].num_slots
    keys, values = ((), None) if with_values is None else mha_content(with_values, num_slots)
    if keys_only is not None:
        keys += _keys_of(keys_only, num_slots)
    indexer = build_group(PoolKind.INDEXER, num_slots, pool.device, options, keys, values)
    return PoolAttachment((*main.groups, indexer), main.splices)


def attach_k_only(pool: Any, options: AttachOptions) -> PoolAttachment:
    """One K-only group over `size + page_size` slots. A pool without layers or slots gives no group."""
    if not pool.layer_num or pool.size <= 0:
        return PoolAttachment()
    num_slots = pool.size + pool.page_size
    keys = _keys_of(pool, num_slots)
    return PoolAttachment((build_group(options.kind, num_slots, pool.device, options, keys),))


def _keys_of(pool: Any, num_slots: int) -> tuple[ContentSource, ...]:
    return row_sources(layer_buffers(pool, "k_buffer"), num_slots, pool.page_size)
