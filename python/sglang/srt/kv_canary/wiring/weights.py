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
        return original(scheduler, recv_req, *args, **kwargs)
    finally:
        context.weight_version = None


@guarded_aside
def after_update(result: tuple[bool, str], model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER a model runner's update that puts the old weights back where it fails."""
    manager = context.manager_of(model_runner)
    success, _ = result
    if success and manager is not None:
        manager.note_weight_update(context.weight_version)


@guarded_aside
def after_partial_update(
    result: tuple[bool, str], model_runner: Any, *args: Any, **kwargs: Any
) -> None:
    """AFTER a model runner's update that may leave a part of the new weights where it fails."""
    success, _ = result
    if success:
        after_update(result, model_runner)
    elif (manager := context.manager_of(model_runner)) is not None:
        manager.note_failed_update()


STALE = "reads of KV that other weights wrote"


def update_hooks(scheduler: str, runner: str) -> tuple[HookSpec, ...]:
    """The hooks on the classes that update weights: of a request, and of one model runner."""
    methods = [f"update_weights_from_{way}" for way in ("disk", "tensor", "distributed", "ipc")]
    after = {methods[0]: after_update}
    return (
        *(HookSpec(f"{scheduler}.{m}", around_request, HookType.AROUND, STALE) for m in methods),
        *(
            HookSpec(f"{runner}.{m}", after.get(m, after_partial_update), HookType.AFTER, STALE)
            for m in methods
        ),
    )
