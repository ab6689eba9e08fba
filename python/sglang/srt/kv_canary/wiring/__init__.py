"""All code that depends on SGLang's call sites: one module per area of SGLang, each with its `HOOKS`.

What differs between releases is in one folder per family of releases: see `releases`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .releases import release

if TYPE_CHECKING:
    from .hook_spec import HookSpec

__all__ = ["collect_hooks"]


def collect_hooks() -> tuple[HookSpec, ...]:
    """The hooks of the installed release, in order. Raises any error of their imports."""
    modules = (import_module(f"{__name__}.{name}") for name in release().hook_modules)
    return tuple(hook for module in modules for hook in module.HOOKS)
