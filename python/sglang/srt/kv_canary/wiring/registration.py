"""The results of `plugin.register()` and of the start-up in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hook_spec import HookSpec

__all__ = ["HookedMethod", "Registration", "SchedulerStart"]


@dataclass(frozen=True, slots=True)
class HookedMethod:
    """A method with our hooks, and what it is below them."""

    owner: type
    name: str
    hooked: Callable[..., Any]
    hooks: tuple[HookSpec, ...]  # outermost first
    original: Callable[..., Any]


@dataclass(slots=True)
class Registration:
    """Written by `plugin.register()`, read by `startup_check.verify_hooks_applied()`."""

    started: bool = False
    hooks: tuple[HookSpec, ...] | None = None  # None until all are registered with SGLang
    left_out: tuple[HookSpec, ...] = ()  # they are not needed, by the environment of that time
    failure: str = ""  # why register() failed; "" if it did not
    # By target, what a scheduler without the canary has taken out
    taken_out: dict[str, HookedMethod] = field(default_factory=dict)

    def hooks_by_target(self) -> dict[str, list[HookSpec]]:
        """In the order in which they are registered."""
        by_target: dict[str, list[HookSpec]] = {}
        for hook in self.hooks or ():
            by_target.setdefault(hook.target, []).append(hook)
        return by_target

    def put_hooks_back(self) -> None:
        """Undo what took hooks out. What somebody else has hooked since stays as it is."""
        while self.taken_out:
            _, out = self.taken_out.popitem()
            # Its own, or inherited
            if getattr(out.owner, out.name, None) is out.original:
                setattr(out.owner, out.name, out.hooked)


@dataclass(slots=True)
class SchedulerStart:
    """The canary's progress in this scheduler process."""

    guarded: bool = False  # launched by run_guarded_scheduler_process
    begun: bool = False  # SGLang has begun to make the Scheduler
    active: dict[str, Any] | None = None  # JSON-ready summary; None until the canary is installed
