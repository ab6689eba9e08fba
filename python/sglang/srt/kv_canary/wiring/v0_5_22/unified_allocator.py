"""Frees of unified pools: each part has a MultiEndedAllocator, whose slots are virtual.

All ways to free end in its `free`: by slots, by segment, at the end of a free group of its own or of the allocator
around it. `free_physical` alone does not. Only HiCache calls it, which unified pools are refused with.

Parts of states have the same class. They are not watched, and their frees are none of tokens.

The part of sliding-window layers hands out no slots of its own. It binds pages to virtual ones of the full part, when
these are handed out. The prefix cache may bind them to others later: see `_before_transfer`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...slot_event import SlotEventKind
from ..allocator import FREES, after_clear, noting_allocations
from ..call_site import QueuedFrees, call_of
from ..context import context
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from .unified_memory import note_free

_MEM_CACHE = "sglang.srt.mem_cache"
_PART = f"{_MEM_CACHE}.allocator.unified_sub_pool.MultiEndedAllocator"
_HYBRID = f"{_MEM_CACHE}.allocator.unified_mamba.UnifiedMambaTokenToKVPoolAllocator"
_SWA = f"{_MEM_CACHE}.allocator.unified_hybrid_swa.UnifiedSWAAllocatorBase"
_CACHE_OF_SWA = f"{_MEM_CACHE}.unified_cache.components.swa.SWAComponent"
# Allocators call each other: who calls the outermost one is of interest.
_FILES = "/sglang/srt/mem_cache/allocator/"
_CACHE_FILES = "/sglang/srt/mem_cache/unified_cache/"  # the same of the prefix cache's components


@guarded
def _before_free(part: Any, free_index: Any, *, _pages: torch.Tensor | None = None) -> None:
    if free_index is None or not free_index.numel() or part not in context.allocator_kinds:
        return
    context.frees += 1
    call = call_of(free_index.numel(), _FILES, is_free=True) if context.history else None
    if part.free_group is not None:
        context.queued_frees.queue(call)
        return
    if _pages is not None:  # one slot of each page of segments, whose calls are not queued
        context.queued_frees = QueuedFrees()
    note_free(part)
    # Usually a view of req_to_token, whose row is rewritten before the event is applied.
    slots = free_index.clone()
    context.slot_event(part, SlotEventKind.FREE, slots, call)


@guarded
def _before_free_of_all(allocator: Any, free_index: Any) -> None:
    """Counted, and queued where a free group does so: its parts free."""
    if free_index is None or not free_index.numel():
        return
    context.frees += 1
    if allocator.free_group is not None and context.history:
        context.queued_frees.queue(call_of(free_index.numel(), _FILES, is_free=True))


@guarded
def _before_free_segment(_: Any, free_index: Any, *, start_pos: int) -> None:
    """Counted only: the parts free, perhaps at the end of a free group."""
    if free_index is not None and free_index.numel():
        context.frees += 1


@guarded
def _after_alloc_with_virtual(_: Any, part: Any, virtual_pages: torch.Tensor) -> None:
    """Pages are bound to virtual pages int64[n], which another part has handed out."""
    if part not in context.allocator_kinds or not virtual_pages.numel():
        return
    size = part.page_size
    places = torch.arange(size, device=virtual_pages.device)
    slots = (virtual_pages[:, None] * size + places).reshape(-1)
    call = call_of(slots.numel(), _FILES) if context.history else None
    context.slot_event(part, SlotEventKind.ALLOC, slots, call)


@guarded
def _before_transfer(
    _: Any, allocator: Any, full_value: torch.Tensor, incoming_full_value: torch.Tensor
) -> None:
    """The prefix cache keeps full slots whose SWA pages are gone. It binds those of the same tokens' new slots to them.

    Both are virtual slots int64[n], in the order of the tokens. They may be views of rows.
    """
    if not full_value.numel():
        return
    call = call_of(full_value.numel(), _CACHE_FILES) if context.history else None
    sources, targets = incoming_full_value.long().clone(), full_value.long().clone()
    context.slots_rebound(allocator.swa_attn_allocator, sources, targets, call)


@guarded
def _before_mapping(allocator: Any, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
    """SWA pages that came from elsewhere get virtual slots. There are no records of them."""
    if full_indices.numel() and allocator.swa_attn_allocator in context.allocator_kinds:
        raise RuntimeError(
            "SWA pages of a unified pool were filled from elsewhere (HiCache or a cache linker), without records"
        )


HOOKS = (
    HookSpec(f"{_PART}.free", _before_free, HookType.BEFORE, FREES),
    HookSpec(f"{_PART}.clear", after_clear, HookType.AFTER, FREES),
    *(
        HookSpec(f"{_PART}.{method}", noting_allocations(_FILES), HookType.AFTER, FREES)
        for method in ("alloc", "alloc_extend", "alloc_decode")
    ),
    HookSpec(f"{_PART}.alloc_with_virtual", _after_alloc_with_virtual, HookType.AFTER, FREES),
    *(
        HookSpec(f"{owner}.{method}", hook, HookType.BEFORE, FREES)
        for owner, method, hook in (
            (_HYBRID, "free", _before_free_of_all),
            (_HYBRID, "free_segment", _before_free_segment),
            (_SWA, "free", _before_free_of_all),
            (_SWA, "free_full", _before_free_of_all),
            (_SWA, "free_segment", _before_free_segment),
            (_SWA, "free_full_segment", _before_free_segment),
            (_SWA, "set_full_to_swa_mapping", _before_mapping),
        )
    ),
    HookSpec(f"{_CACHE_OF_SWA}._transfer_swa_pages", _before_transfer, HookType.BEFORE, FREES),
)
