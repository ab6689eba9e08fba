"""Hooks for SGLANG_KV_CANARY_ACTION=abort that all releases share. Without it they do nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ..context import context
from ..guard import attempt_aside, guarded, guarded_aside
from ..hook_spec import HookSpec, HookType
from ..releases import release
from ..scheduler import after_idle

__all__ = [
    "ACTION",
    "HOOKS",
    "after_clear",
    "around_check_pool",
    "around_recv_requests",
    "around_send_to_next_stage",
    "before_eviction",
    "before_row_free",
]


def around_recv_requests(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    containment = context.containment
    if containment is None:
        return original(*a, **k)
    with containment.receiving():
        requests = containment.received(original(*a, **k))
    _between_steps(containment)
    if context.held_sends is not None:
        context.held_sends.begin_round()
        context.held_sends.go_on()  # a paused server does not come to its queue
    return requests


@guarded_aside
def _between_steps(containment: Any) -> None:
    containment.between_steps()
    context.target.damage.say_lost()


def around_send_to_next_stage(
    original: Callable[..., Any], scheduler: Any, data: Any, *a: Any, **k: Any
) -> Any:
    """What a pipeline stage passes on: the requests of a step, as long as nothing else is sent."""
    sent = getattr(context.containment, "sent", None)
    return original(scheduler, data if sent is None else sent(data), *a, **k)


def _around_broadcast(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    if (bell := getattr(context.containment, "bell", None)) is None:
        return original(*a, **k)
    return bell.around_broadcast(original, *a, **k)


@guarded_aside
def before_row_free(_: Any, request: Any, *__: Any, **___: Any) -> None:
    if context.containment is not None and release().row_of(request) is not None:
        context.containment.note_finished(request)


def _around_release(original: Callable[..., Any], request: Any, *a: Any, **k: Any) -> Any:
    containment = context.containment
    careful = None if containment is None else attempt_aside(containment.releasing, request)
    with careful or nullcontext():
        return original(request, *a, **k)


@guarded_aside
def _before_idle(scheduler: Any) -> None:
    if context.containment is not None and scheduler.is_fully_idle():
        after_idle(None, scheduler)
        context.containment.on_idle()


@guarded
def after_clear(_: Any, allocator: Any) -> None:
    if context.containment is not None:
        context.containment.after_clear(allocator)


@guarded_aside
def before_eviction(*_: Any) -> None:
    """Copies to host memory and retracted requests let go of nodes in the middle of a step."""
    if context.containment is not None:
        context.containment.before_eviction()


def around_check_pool(
    original: Callable[..., tuple[bool, str]], pool_name: str, available: int, *a: Any, **k: Any
) -> tuple[bool, str]:
    """Withheld slots are neither in use nor a leak."""
    withheld, waits = 0, False
    if context.containment is not None:
        withheld = context.containment.withheld.counts()[pool_name.upper()]
        waits = context.containment.may_miss_slots
    leak, text = original(pool_name, available + withheld, *a, **k)
    return (
        leak and not waits,
        f"{text}, {withheld} of the available ones withheld" if withheld else text,
    )


ACTION = "requests that read damage, which SGLANG_KV_CANARY_ACTION=abort ends"
_MEM_CACHE = "sglang.srt.mem_cache"
HOOKS = (
    HookSpec(
        "sglang.srt.utils.common.broadcast_pyobj",
        _around_broadcast,
        HookType.AROUND,
        ACTION,
        only_with="ACTION",
    ),
    HookSpec(
        "sglang.srt.managers.scheduler.Scheduler.on_idle", _before_idle, HookType.BEFORE, ACTION
    ),
    HookSpec(
        "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin._pp_send_pyobj_to_next_stage",
        around_send_to_next_stage,
        HookType.AROUND,
        ACTION,
    ),
    HookSpec(
        f"{_MEM_CACHE}.common.release_kv_cache",
        _around_release,
        HookType.AROUND,
        ACTION,
        only_with="ACTION",
    ),
    HookSpec(
        f"{_MEM_CACHE}.memory_pool.ReqToTokenPool.free",
        before_row_free,
        HookType.BEFORE,
        ACTION,
        only_with="ACTION",
    ),
)
