"""Requests that wait until what they received has been checked: SGLANG_KV_CANARY_ACTION=abort."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..arrivals import address_of, arrival_of, take_in
from ..context import context
from ..guard import attempt
from .abort import fail_transfer

__all__ = ["hold", "was_held"]

_HELD = "_kv_canary_held"  # of a receiver: the forward that checks what it received; 0: not checked


def hold(scheduler: Any, waiting: Any) -> None:
    """Let `waiting`, a DecodeRequest, succeed only when what it received is known to be right.

    Damage fails its transfer. SGLang then ends the request alone, on all ranks, and caches nothing of it.
    """
    receiver = waiting.kv_receiver
    if not hasattr(receiver, _HELD):
        setattr(receiver, _HELD, None)
        receiver.poll = functools.partial(
            _poll_held, receiver.poll, scheduler, waiting.req, receiver
        )


def was_held(request: Any) -> bool:
    """Whether what `request` received has been checked before it succeeded."""
    return request.__dict__.pop(_HELD, False)


def _poll_held(original: Callable[[], int], scheduler: Any, request: Any, receiver: Any) -> int:
    from sglang.srt.disaggregation.base import KVPoll

    status = original()
    if status != KVPoll.Success:
        return status
    verdict = attempt(_verdict, scheduler, request, receiver)
    if verdict is None:  # also after an internal error, with which serving goes on
        waits = getattr(receiver, _HELD) is not None and context.target.armed
        return KVPoll.Transferring if waits else status
    if not verdict:
        return status
    where = address_of(request)
    fail_transfer(
        receiver, request, f"the KV that arrived from the prefill server {where} is damaged"
    )
    context.target.arrivals.outcomes["aborted"] += 1
    del receiver.poll  # SGLang's own again: the failure is known
    return KVPoll.Failed


def _verdict(scheduler: Any, request: Any, receiver: Any) -> bool | None:
    """Whether what arrived is damaged. None: not known yet."""
    manager = context.target
    forward = getattr(receiver, _HELD)
    if forward is None:
        arrival = arrival_of(scheduler, request)
        forward = take_in(scheduler, [request], [arrival], awaited=arrival.has_records)
        forward = forward if arrival.has_records else 0
        setattr(request, _HELD, True)
        setattr(receiver, _HELD, forward)
    if not forward:
        return False
    manager.drain()
    rows = manager.arrivals.verdict(forward)
    if rows is None:
        return None
    manager.arrivals.forget(forward)
    setattr(receiver, _HELD, 0)
    return request.req_pool_idx in rows
