"""The SWA allocator."""

from __future__ import annotations

from ..allocator import FREES, before_free
from ..hook_spec import HookSpec, HookType

HOOKS = (
    # Only counted: its inner allocators, which are watched, see a free group at its end.
    HookSpec(
        "sglang.srt.mem_cache.swa_memory_pool.SWATokenToKVPoolAllocator.free",
        before_free,
        HookType.BEFORE,
        FREES,
    ),
)
