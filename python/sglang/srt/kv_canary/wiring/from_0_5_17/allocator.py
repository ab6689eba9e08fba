"""Frees that `free()` does not see: by page, and of the SWA slots of some full slots."""

from __future__ import annotations

from typing import Any

import torch

from ...slot_event import SlotEventKind
from ..allocator import FREES
from ..call_site import call_of
from ..context import context
from ..guard import guarded
from ..hook_spec import HookSpec, HookType


@guarded
def _before_release(allocator: Any, *page_ids: torch.Tensor) -> None:
    """Pages become free, whichever method frees them, at once or at the end of a free group."""
    if allocator not in context.allocator_kinds:
        return
    for pages in page_ids:
        first_slots = pages.detach() * allocator.page_size
        call = call_of(pages.numel(), is_free=True) if context.history else None
        context.slot_event(allocator, SlotEventKind.FREE, first_slots, call)


@guarded
def _count_free(_: Any, freed: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Only counted: pages become free in `_release_page_ids`, SWA slots in their own allocator."""
    if freed.numel():
        context.frees += 1


PAGED = "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator"
SWA = "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator"


def free_hooks(*counted: str) -> tuple[HookSpec, ...]:
    """The hooks. `counted`: methods that free through other ones, perhaps at the end of a free group."""
    return (
        HookSpec(f"{PAGED}._release_page_ids", _before_release, HookType.BEFORE, FREES),
        *(HookSpec(method, _count_free, HookType.BEFORE, FREES) for method in counted),
    )
