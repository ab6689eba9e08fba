"""Hooks on weight updates: a model runner has other weights from the next forward on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .context import context
from .guard import guarded_aside
from .hook_spec import HookSpec, HookType


def _around_request(
    original: Callable[..., Any], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND the scheduler's update. The request may name the new weights; model runners do not receive the name."""
    context.weight_version = getattr(recv_req, "weight_version", None)
    try:
        return original(scheduler, recv_req, *args, **kwargs)
    finally:
        context.weight_version = None


@guarded_aside
def _after_update(result: tuple[bool, str], model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER a model runner's update, which may have failed."""
    manager = context.manager_of(model_runner)
    success, _ = result
    if success and manager is not None:
        manager.note_weight_update(context.weight_version)


_WAYS = ("disk", "tensor", "distributed", "ipc")
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_LOST = "reads of KV that other weights wrote"
HOOKS = tuple(
    hook
    for way in _WAYS
    for hook in (
        HookSpec(
            f"{_SCHEDULER}.update_weights_from_{way}", _around_request, HookType.AROUND, _LOST
        ),
        HookSpec(f"{_RUNNER}.update_weights_from_{way}", _after_update, HookType.AFTER, _LOST),
    )
)
