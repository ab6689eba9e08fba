"""Frees of unified pools: each part has a MultiEndedAllocator, whose slots are virtual.

All ways to free end in its `free`: by slots, by segment, at the end of a free group of its own or of the allocator
around it. `free_physical` alone does not. Only HiCache calls it, which unified pools are refused with.

Parts of states have the same class. They are not watched, and their frees are none of tokens.
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

_ALLOCATORS = "sglang.srt.mem_cache.allocator"
_PART = f"{_ALLOCATORS}.unified_sub_pool.MultiEndedAllocator"
_HYBRID = f"{_ALLOCATORS}.unified_mamba.UnifiedMambaTokenToKVPoolAllocator"
# Allocators call each other: who calls the outermost one is of interest.
_FILES = "/sglang/srt/mem_cache/allocator/"


@guarded
def _before_free(part: Any, free_index: Any, *, _pages: torch.Tensor | None = None) -> None:
    if free_index is None or not free_index.numel() or id(part) not in context.allocator_kinds:
        return
    context.frees += 1
    call = call_of(free_index.numel(), _FILES) if context.history else None
    if part.free_group is not None:
        context.queued_frees.queue(call)
        return
    if _pages is not None:  # one slot of each page of segments, whose calls are not queued
        context.queued_frees = QueuedFrees()
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
        context.queued_frees.queue(call_of(free_index.numel(), _FILES))


@guarded
def _before_free_segment(_: Any, free_index: Any, *, start_pos: int) -> None:
    """Counted only: the parts free, perhaps at the end of a free group."""
    if free_index is not None and free_index.numel():
        context.frees += 1


HOOKS = (
    HookSpec(f"{_PART}.free", _before_free, HookType.BEFORE, FREES),
    HookSpec(f"{_PART}.clear", after_clear, HookType.AFTER, FREES),
    *(
        HookSpec(f"{_PART}.{method}", noting_allocations(_FILES), HookType.AFTER, FREES)
        for method in ("alloc", "alloc_extend", "alloc_decode")
    ),
    HookSpec(f"{_HYBRID}.free", _before_free_of_all, HookType.BEFORE, FREES),
    HookSpec(f"{_HYBRID}.free_segment", _before_free_segment, HookType.BEFORE, FREES),
)
