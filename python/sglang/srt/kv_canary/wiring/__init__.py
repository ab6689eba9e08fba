"""All code that depends on SGLang's call sites: one module per area of SGLang, each with its `HOOKS`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hook_spec import HookSpec

__all__ = ["HOOK_MODULES", "collect_hooks"]

# Later hooks on one target wrap earlier ones. startup_check stays last, so that it sees every error.
HOOK_MODULES: tuple[str, ...] = (
    "allocator",
    "cuda_graph",
    "last_words",
    "memory",
    "model_runner",
    "sampled_tokens",
    "schedule_stream",
    "scheduler",
    "speculative",
    "swa_location",
    "token_oracle",
    "weights",
    "farewell",  # after last_words: reports that it triggers come before the last words
    "startup_check",
)


def collect_hooks() -> tuple[HookSpec, ...]:
    """The hooks of all modules, in order. Raises any error of their imports."""
    modules = (import_module(f"{__name__}.{name}") for name in HOOK_MODULES)
    return tuple(hook for module in modules for hook in module.HOOKS)
