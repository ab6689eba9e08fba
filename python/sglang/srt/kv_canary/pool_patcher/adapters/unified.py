"""Unified pools: sub-pools of several kinds share one buffer, and pages move in it while requests run.

Requests and the prefix cache hold virtual slots. `MultiEndedAllocator` has a table of the physical page of each virtual
page, and one back. Attention reads and writes physical slots, which SGLang looks up once per forward.

Records are kept by virtual slot and never move. Bytes are found through the table, at the moment when they are read.
Compaction copies a page, and only then changes the table, on one stream. A read of the new entry finds the copy. A
forward that runs at that time may read the old entry, and finds the old page untouched. SGLang moves no page that this
forward writes, and hands the old page out again only after it. So a fingerprint stays as it was. SGLang may hand out
and zero a page that is freed earlier, under a forward. The wiring makes it wait for that forward.

Sliding-window layers have a sub-pool and a table of their own, for the same virtual slots. A slot that leaves the
window loses its SWA page only. If its tokens are computed again, in other slots, SGLang binds their SWA pages to the
slots that the prefix cache keeps. No byte moves, but the records of these tokens have to: see `RecordMove`.

A page that is unbound, with -1, has been freed. Its slots have no bytes, and their content is not checked: attention
reads the padding page instead. That a request reads them at all is USE_AFTER_FREE, by their records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...buffer_group import ContentSource
from ...page_table import PageTable
from ...pool_kind import PoolKind
from ..attachment import AttachOptions, PoolAttachment
from ..content_layout import row_sources
from ..errors import UnsupportedPoolError
from ..group_builder import build_group
from ..layers import layer_buffers
from .sub_pool import attach_sub_pool, sliding_window_of

_ALLOCATORS = ("full_attn_allocator", "swa_attn_allocator")


def attach_unified_mha(pool: Any, options: AttachOptions) -> PoolAttachment:
    """One group with K and V over the virtual slots. `options.allocator` owns the page tables."""
    return _attach(pool, options, ("k_buffer", "v_buffer"))


def attach_unified_mla(pool: Any, options: AttachOptions) -> PoolAttachment:
    """One K-only group over the virtual slots. `options.allocator` owns the page tables."""
    return _attach(pool, options, ("kv_buffer",))


def attach_unified_swa(pool: Any, options: AttachOptions) -> PoolAttachment:
    """FULL over `full_kv_pool` and SWA over `swa_kv_pool`, both over the same virtual slots, without a mapping."""
    full = attach_sub_pool(pool, "full_kv_pool", options, PoolKind.FULL)
    swa = attach_sub_pool(pool, "swa_kv_pool", options, PoolKind.SWA)
    window = sliding_window_of(pool, options)
    return PoolAttachment(full.groups + tuple(replace(g, window=window) for g in swa.groups))


def _attach(pool: Any, options: AttachOptions, buffers: tuple[str, ...]) -> PoolAttachment:
    allocator = _allocator_of(pool, options.allocator)
    _refuse_other_pages(pool, allocator)
    rows = pool.size + pool.page_size
    places = PageTable(allocator.virtual_to_physical, pool.page_size, rows // pool.page_size)
    halves = [_sources(layer_buffers(pool, name), rows, places) for name in buffers]
    num_slots = allocator.num_virtual_ids * pool.page_size
    group = build_group(options.kind, num_slots, pool.device, options, *halves)
    names = PageTable(allocator.physical_to_virtual, pool.page_size, allocator.num_virtual_ids)
    # Buffer lists name the raw buffer as one entry. No record lies beside it: transfers are refused.
    return PoolAttachment((replace(group, slot_names=names),))


def _allocator_of(pool: Any, composite: Any) -> Any:
    """The MultiEndedAllocator of `pool`, which is a part of the model's allocator."""
    for name in _ALLOCATORS:
        part = getattr(composite, name, None)
        if part is not None and part.get_kvcache() is pool:
            return part
    raise UnsupportedPoolError(
        f"{type(pool).__name__} has slots that only its allocator can find. Expected it as "
        f"{' or '.join(_ALLOCATORS)} of the model's allocator, got {type(composite).__name__} without one: attach "
        "after the allocator has been built"
    )


def _refuse_other_pages(pool: Any, allocator: Any) -> None:
    name = type(pool).__name__
    if allocator.page_size != pool.page_size:
        raise UnsupportedPoolError(
            f"{name} keeps pages of {pool.page_size} slots and its allocator frees pages of {allocator.page_size}: "
            "slots are spread over ranks (--dcp-size)"
        )
    if pool._unified_buffer.post_capture_active:
        raise UnsupportedPoolError(
            f"{name} is sized after graph capture, when its records exist already; unset "
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
        )


def _sources(
    buffers: Sequence[torch.Tensor], rows: int, places: PageTable
) -> tuple[ContentSource, ...]:
    """Sources of layers `[rows, ...]`, one entry of all layers apart, whose pages lie where the table says."""
    size = places.page_size
    return tuple(
        replace(
            source,
            page_size=size,
            page_stride=size * source.page_stride,
            token_stride=source.page_stride,
            page_table=places,
        )
        for source in row_sources(buffers, rows, size)
    )
