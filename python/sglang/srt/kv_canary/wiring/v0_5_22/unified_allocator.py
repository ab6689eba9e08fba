"""Frees of unified pools: each part has a MultiEndedAllocator, whose slots are virtual.

All ways to free end in its `free`: by slots, by segment, at the end of a free group of its own or of the allocator
around it. `free_physical` alone does not. Only HiCache calls it, which unified pools are refused with.
"""

from __future__ import annotations

from typing import Any

from ..allocator import FREES, after_alloc, after_clear, before_free
from ..context import context
from ..guard import guarded
from ..hook_spec import HookSpec, HookType

_ALLOCATORS = "sglang.srt.mem_cache.allocator"
_PART = f"{_ALLOCATORS}.unified_sub_pool.MultiEndedAllocator"
_HYBRID = f"{_ALLOCATORS}.unified_mamba.UnifiedMambaTokenToKVPoolAllocator"


@guarded
def _before_free(allocator: Any, free_index: Any, *args: Any, **kwargs: Any) -> None:
    if free_index is not None:
        before_free(allocator, free_index, *args, **kwargs)


@guarded
def _count_free(_: Any, free_index: Any, *args: Any, **kwargs: Any) -> None:
    """Only counted: the parts' allocators free, perhaps at the end of a free group."""
    if free_index is not None and free_index.numel():
        context.frees += 1


HOOKS = (
    HookSpec(f"{_PART}.free", _before_free, HookType.BEFORE, FREES),
    HookSpec(f"{_PART}.clear", after_clear, HookType.AFTER, FREES),
    *(
        HookSpec(f"{_PART}.{method}", after_alloc, HookType.AFTER, FREES)
        for method in ("alloc", "alloc_extend", "alloc_decode")
    ),
    *(
        HookSpec(f"{_HYBRID}.{method}", _count_free, HookType.BEFORE, FREES)
        for method in ("free", "free_segment")
    ),
)
