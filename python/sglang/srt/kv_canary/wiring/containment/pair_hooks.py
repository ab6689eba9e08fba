"""Hooks for SGLANG_KV_CANARY_ACTION=abort on servers of prefill-decode disaggregation that releases share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..context import context
from ..disaggregation import DECODE, PREFILL
from ..guard import attempt_aside, guarded_aside
from ..hook_spec import HookSpec, HookType
from .held_sends import HeldSends
from .hooks import ACTION, before_row_free

__all__ = ["HOOKS", "INFLIGHT_QUEUE", "hold_sends"]


def _around_send(
    original: Callable[..., Any],
    scheduler: Any,
    request: Any,
    last_chunk: bool = False,
    *a: Any,
    **k: Any,
) -> Any:
    held = context.held_sends
    if last_chunk and held is not None and attempt_aside(held.must_wait, request):
        return None
    return original(scheduler, request, last_chunk, *a, **k)


def _before_inflight_queue(*_: Any, **__: Any) -> None:
    if context.held_sends is not None:
        context.held_sends.go_on()


@guarded_aside
def _before_bootstrap(_: Any, request: Any, *__: Any, **___: Any) -> None:
    if context.containment is not None:
        context.sent_chunks.forget(request.bootstrap_room)


def hold_sends(scheduler: Any) -> None:
    """On a prefill server whose requests can end."""
    if context.containment is not None and scheduler.server_args.disaggregation_mode == "prefill":
        send = functools.partial(scheduler.send_kv_chunk, last_chunk=True)
        context.held_sends = HeldSends(context.containment.bell, send)


_MIXIN = f"{PREFILL}.SchedulerDisaggregationPrefillMixin"
INFLIGHT_QUEUE = f"{_MIXIN}.process_disagg_prefill_inflight_queue"
HOOKS = (
    HookSpec(f"{_MIXIN}.send_kv_chunk", _around_send, HookType.AROUND, ACTION),
    HookSpec(INFLIGHT_QUEUE, _before_inflight_queue, HookType.BEFORE, ACTION),
    HookSpec(f"{PREFILL}.PrefillBootstrapQueue.add", _before_bootstrap, HookType.BEFORE, ACTION),
    # No subclass of the pool that other servers have
    HookSpec(f"{DECODE}.DecodeReqToTokenPool.free", before_row_free, HookType.BEFORE, ACTION),
)
