"""One hook into SGLang, as data: its target, its function, and what is unprotected without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

__all__ = ["HookSpec", "HookType"]


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class HookSpec:
    """A hook for SGLang's `HookRegistry`. `fn` has the signature that `HookRegistry.register` expects."""

    target: str  # dotted path, e.g. "sglang.srt.managers.scheduler.Scheduler.__init__"
    fn: Callable[..., Any]
    hook_type: HookType
    # What is unprotected without the hook
    protects: str = "an unknown part of the KV pool"
    # Asked once in a process. A hook that would do nothing is left out where it is called in each step.
    is_needed: Callable[[], bool] = _always
