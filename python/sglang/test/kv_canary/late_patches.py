"""Plugins that replace a hooked function after the hooks were checked, as another package may do."""

from __future__ import annotations

import pkgutil
from itertools import count
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

__all__ = [
    "FORWARD",
    "REPLACED",
    "replace",
    "replaces_at_a_flush",
    "replaces_at_the_start",
    "replaces_the_forward_while_busy",
]

REPLACED = "sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator.free"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
RESULTS_BEFORE = 30
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def replace(*_: Any, **__: Any) -> None:
    """Put SGLang's own function back."""
    _put_back(REPLACED)


def _put_back(target: str) -> None:
    owner, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    hooked = getattr(owner, name)
    while hasattr(hooked, "__wrapped__"):
        hooked = hooked.__wrapped__
    setattr(owner, name, hooked)


def replaces_at_the_start() -> None:
    """Between the canary's installation and the end of the scheduler's start."""
    HookRegistry.register(f"{_SCHEDULER}.init_model_worker", replace, HookType.AFTER)


def replaces_at_a_flush() -> None:
    """While the server serves."""
    HookRegistry.register(f"{_SCHEDULER}.flush_cache", replace, HookType.BEFORE)


def replaces_the_forward_while_busy() -> None:
    """After some results, while requests run. Without this hook no counters come from the device."""
    results = count(1)

    def replace_once(_: Any, scheduler: Any, *__: Any) -> None:
        if next(results) == RESULTS_BEFORE:
            _put_back(FORWARD)
            vars(scheduler.tp_worker.model_runner).pop("forward", None)  # the fault injector's

    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", replace_once, HookType.AFTER)
