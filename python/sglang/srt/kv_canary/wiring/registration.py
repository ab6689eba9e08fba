"""What became of `register()` in this process, kept where an import that fails cannot lose it.

It imports nothing of SGLang, because SGLang may be a release in which those imports fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hook_spec import HookSpec

__all__ = ["Registration", "registration"]


@dataclass(slots=True)
class Registration:
    """Written once by `plugin.register()`, read by `startup_check.verify_hooks_applied()`."""

    started: bool = False
    hooks: tuple[HookSpec, ...] | None = None  # None until SGLang has been handed all of them
    failure: str = ""  # why register() failed; "" if it did not


registration = Registration()
