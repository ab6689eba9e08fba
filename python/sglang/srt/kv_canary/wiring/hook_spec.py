"""One hook into SGLang, as data: what is hooked, with what, and what is lost where it is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

__all__ = ["HookSpec", "HookType"]


@dataclass(frozen=True, slots=True)
class HookSpec:
    """A hook for SGLang's `HookRegistry`; signatures of `fn` are those of `HookRegistry.register`."""

    target: str  # dotted path, e.g. "sglang.srt.managers.scheduler.Scheduler.__init__"
    fn: Callable[..., Any]
    hook_type: HookType
    protects: str = "an unknown part of the KV pool"  # what is unprotected if it does not apply
