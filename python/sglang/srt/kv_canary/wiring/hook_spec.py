"""One hook into SGLang, as data: its target, its function, and what is unprotected without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from ..environ import is_given

__all__ = ["HookSpec", "HookType"]


@dataclass(frozen=True, slots=True)
class HookSpec:
    """A hook for SGLang's `HookRegistry`. `fn` has the signature that `HookRegistry.register` expects."""

    target: str  # dotted path, e.g. "sglang.srt.managers.scheduler.Scheduler.__init__"
    fn: Callable[..., Any]
    hook_type: HookType
    # What is unprotected without the hook
    protects: str = "an unknown part of the KV pool"
    # Key of a setting without which it does nothing. Such a hook is left out where each step would call it.
    only_with: str = ""
    # It does nothing, as a hook before a method, if the first argument is a tensor without elements
    skips_empty: bool = False

    @property
    def is_needed(self) -> bool:
        return not self.only_with or is_given(self.only_with)
