"""`/server_info` shows under `internal_states` whether each runner is still checked.

What the start has added to it, `kv_canary_active`, says what is protected, and never changes again.
"""

from __future__ import annotations

from typing import Any

from .context import context
from .guard import guarded_aside
from .hook_spec import HookSpec, HookType

__all__ = ["HOOKS", "after_internal_state"]


@guarded_aside
def after_internal_state(answer: Any, scheduler: Any, request: Any) -> None:
    """AFTER Scheduler.get_internal_state, in the first rank of each replica."""
    if context.active:
        answer.internal_state["kv_canary"] = [manager.state_now() for manager in context.managers]


HOOKS = (
    HookSpec(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        after_internal_state,
        HookType.AFTER,
        "what /server_info says of the checks",
    ),
)
