"""Hooks on weight updates: a model runner has other weights from the next forward on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .context import context
from .guard import guarded_aside
from .hook_spec import HookSpec, HookType


def around_request(
    original: Callable[..., Any], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND the scheduler's update. The request may name the new weights; model runners do not receive the name."""
    context.weight_version = getattr(recv_req, "weight_version", None)
    try:
        returned = original(scheduler, recv_req, *args, **kwargs)
    finally:
        context.weight_version = None
    context.failed_load = context.failed_load or getattr(returned, "success", None) is False
    return returned


# In messages of updates that fail when weights may have been replaced. What SGLang rolls back to is not what was there:
# it has named the new path before it reads anything.
_REPLACED = ("partially updated", "Rolling back")


def _note(model_runner: Any, success: bool, may_be_replaced: bool) -> None:
    """An update of a model runner has ended. `may_be_replaced`: if it has failed, weights may still be new ones."""
    manager = context.manager_of(model_runner)
    if manager is None:
        return
    if success:
        manager.note_weight_update(context.weight_version)
    elif may_be_replaced:
        manager.note_failed_update()


@guarded_aside
def after_update(result: tuple[bool, str], model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER a model runner's update, which may have failed."""
    success, message = result
    _note(model_runner, success, any(words in message for words in _REPLACED))


@guarded_aside
def after_ipc_update(
    result: tuple[bool, str], model_runner: Any, *args: Any, **kwargs: Any
) -> None:
    """AFTER an update whose message says only what was raised, wherever that was."""
    success, message = result
    _note(model_runner, success, "ImportError" not in message)


STALE = "reads of KV that other weights wrote"


def update_hooks(scheduler: str, runner: str) -> tuple[HookSpec, ...]:
    """The hooks on the classes that update weights: of a request, and of one model runner."""
    methods = [f"update_weights_from_{way}" for way in ("disk", "tensor", "distributed", "ipc")]
    after = {"update_weights_from_ipc": after_ipc_update}
    return (
        *(HookSpec(f"{scheduler}.{m}", around_request, HookType.AROUND, STALE) for m in methods),
        *(
            HookSpec(f"{runner}.{m}", after.get(m, after_update), HookType.AFTER, STALE)
            for m in methods
        ),
    )
