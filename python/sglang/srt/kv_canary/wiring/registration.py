"""The results of `plugin.register()` and of the start-up in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hook_spec import HookSpec

__all__ = ["Registration", "SchedulerStart"]


@dataclass(slots=True)
class Registration:
    """Written once by `plugin.register()`, read by `startup_check.verify_hooks_applied()`."""

    started: bool = False
    hooks: tuple[HookSpec, ...] | None = None  # None until all are registered with SGLang
    left_out: tuple[HookSpec, ...] = ()  # they are not needed, by the environment of that time
    failure: str = ""  # why register() failed; "" if it did not


@dataclass(slots=True)
class SchedulerStart:
    """The canary's progress in this scheduler process."""

    guarded: bool = False  # launched by run_guarded_scheduler_process
    begun: bool = False  # SGLang has begun to make the Scheduler
    active: dict[str, Any] | None = None  # JSON-ready summary; None until the canary is installed
