"""Plugins that replace a hooked function after the hooks were checked, as another package may do."""

from __future__ import annotations

import pkgutil
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

__all__ = ["REPLACED", "replace", "replaces_at_a_flush", "replaces_at_the_start"]

REPLACED = "sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator.free"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def replace(*_: Any, **__: Any) -> None:
    """Put SGLang's own function back."""
    owner, _, name = REPLACED.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    hooked = getattr(owner, name)
    setattr(owner, name, getattr(hooked, "__wrapped__", hooked))


def replaces_at_the_start() -> None:
    """Between the canary's installation and the end of the scheduler's start."""
    HookRegistry.register(f"{_SCHEDULER}.init_model_worker", replace, HookType.AFTER)


def replaces_at_a_flush() -> None:
    """While the server serves."""
    HookRegistry.register(f"{_SCHEDULER}.flush_cache", replace, HookType.BEFORE)
