"""Hooks for SGLANG_KV_CANARY_ACTION=abort on servers of prefill-decode disaggregation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..containment.held_sends import HeldSends
from ..containment.hooks import ACTION, before_row_free
from ..containment.pairs import for_decode_server, for_prefill_server
from ..containment.terms import Terms
from ..context import context
from ..disaggregation import COPY, DECODE, PREFILL
from ..guard import attempt_aside, guarded_aside
from ..hook_spec import HookSpec, HookType

__all__ = ["HOOKS", "for_server_of", "hold_sends"]


def for_server_of(scheduler: Any, terms: Terms) -> Terms:
    """`terms` of a plain server, for the kind of server that `scheduler` is."""
    mode = scheduler.server_args.disaggregation_mode
    if mode == "prefill":
        return for_prefill_server(terms)
    return for_decode_server(terms, _forget_copy) if mode == "decode" else terms


def _forget_copy(_: Any, request: Any) -> None:
    request.__dict__.pop("kv_cache_cpu", None)
    request.__dict__.pop(COPY, None)


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


@guarded_aside
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
        rounds = 0 if context.containment.bell is None else 2
        send = functools.partial(scheduler.send_kv_chunk, last_chunk=True)
        context.held_sends = HeldSends(rounds, send)


_MIXIN = f"{PREFILL}.SchedulerDisaggregationPrefillMixin"
HOOKS = (
    HookSpec(f"{_MIXIN}.send_kv_chunk", _around_send, HookType.AROUND, ACTION),
    HookSpec(
        f"{_MIXIN}.process_disagg_prefill_inflight_queue",
        _before_inflight_queue,
        HookType.BEFORE,
        ACTION,
    ),
    HookSpec(f"{PREFILL}.PrefillBootstrapQueue.add", _before_bootstrap, HookType.BEFORE, ACTION),
    # No subclass of the pool that other servers have
    HookSpec(f"{DECODE}.DecodeReqToTokenPool.free", before_row_free, HookType.BEFORE, ACTION),
)
