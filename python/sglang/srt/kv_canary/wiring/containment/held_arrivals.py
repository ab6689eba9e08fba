"""Requests that do not begin with damaged KV.

With SGLANG_KV_CANARY_ACTION=abort here, they wait until what they received has been checked. With it on the prefill
server, that server says which requests have read damage there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...config import Action
from ...reports.safe_text import safe_text
from ..arrivals import address_of, arrival_of, extent_of, take_in
from ..context import context
from ..guard import attempt
from ..releases import release
from .abort import message
from .pairs import fail_naming, raise_naming

__all__ = ["hold", "was_held"]

_ELSEWHERE = "this request's KV is right on this tensor-parallel rank, and another one has failed its transfer"
_DAMAGED = "is damaged"
_NOT_KNOWN = "may be damaged: more was found at once than SGLANG_KV_CANARY_RING_CAPACITY keeps"
_PERHAPS = (
    "it may be damage. The log of the tensor-parallel rank that has failed the transfer says why"
)
_WRAPPED = "_kv_canary_polled"  # of a receiver: it is asked here
_HELD = "_kv_canary_held"  # of a receiver: the forward that checks what it received; 0: not checked
_COUNTED = "_kv_canary_counted"  # of a receiver: its failure is one of ours


def _always() -> bool:
    return True


def hold(
    scheduler: Any,
    waiting: Any,
    await_end: Callable[[Callable[[], int]], int],
    is_whole: Callable[[], bool] = _always,
) -> None:
    """Let `waiting`, a DecodeRequest, succeed only with KV that is right, as far as its server or this one checks it.

    Damage fails its transfer. SGLang then ends the request alone, on all ranks, and caches nothing of it.
    `await_end`: the status of a failed transfer, by its poll, once SGLang may free its slots on this rank.
    `is_whole`: whether the row has all that the request needs, once its transfer has succeeded. SGLang waits for it.
    """
    receiver = waiting.kv_receiver
    if not hasattr(receiver, _WRAPPED):
        setattr(receiver, _WRAPPED, True)
        poll, request = receiver.poll, waiting.req
        receiver.poll = functools.partial(_poll_held, poll, scheduler, request, receiver, is_whole)
        receiver.failure_exception = functools.partial(
            _raise_when_over, receiver.failure_exception, poll, await_end, request, receiver
        )


def was_held(request: Any) -> bool:
    """Whether what `request` received has been checked before it succeeded."""
    return request.__dict__.pop(_HELD, False)


def _poll_held(
    original: Callable[[], int],
    scheduler: Any,
    request: Any,
    receiver: Any,
    is_whole: Callable[[], bool],
) -> int:
    from sglang.srt.disaggregation.base import KVPoll

    status = original()
    if status != KVPoll.Success:
        return status
    if damage := _damage_at_sender(request):
        return _fail(receiver, request, damage)
    if context.target.config.action is not Action.ABORT:
        return status
    if not is_whole():
        return status
    verdict = attempt(_verdict, scheduler, request, receiver)
    if verdict is None:  # also after an internal error, with which serving goes on
        waits = getattr(receiver, _HELD, None) is not None and context.target.armed
        return KVPoll.Transferring if waits else status
    if not verdict:
        return status
    where = address_of(request)
    what = f"the KV that arrived from the prefill server {where} {verdict}"
    return _fail(receiver, request, what)


def _damage_at_sender(request: Any) -> str:
    damage = context.notices.damage(request.bootstrap_room)
    return damage and f"on the prefill server {address_of(request)}: {safe_text(damage)}"


def _raise_when_over(
    original: Callable[[], None],
    poll: Callable[[], int],
    await_end: Callable[[Callable[[], int]], int],
    request: Any,
    receiver: Any,
) -> None:
    """On another rank the transfer has ended, on this one KV may still come into its slots.

    Only where a canary may have failed it. A transfer that has failed by itself fails as without the canary.
    """
    from sglang.srt.disaggregation.base import KVPoll

    damage = _damage_at_sender(request)
    if damage or context.target.config.action is Action.ABORT:
        forward = getattr(receiver, _HELD, None)
        if forward:  # nobody asks for its verdict any more
            context.target.arrivals.forget(forward)
        status = await_end(poll)
        is_right_here = status == KVPoll.Success and forward == 0
        if damage:
            _count(receiver)
        if damage or is_right_here:
            raise_naming(original, message(damage or _ELSEWHERE))
        if status != KVPoll.Failed:
            _raise_hinting(original)
    original()


def _raise_hinting(original: Callable[[], None]) -> None:
    """SGLang says that it is another rank, and not why."""
    try:
        original()
    except Exception as error:
        raise RuntimeError(f"{error}. {message(_PERHAPS)}") from error


def _fail(receiver: Any, request: Any, what: str) -> int:
    """End `request`, whose KV has arrived and is not used yet. All ranks learn of it from SGLang's own poll."""
    from sglang.srt.disaggregation.base import KVPoll

    receiver.kv_mgr.record_failure(request.bootstrap_room, message(what))
    receiver.kv_mgr.update_status(request.bootstrap_room, KVPoll.Failed)
    receiver.conclude_state = KVPoll.Failed
    fail_naming(receiver, message(what))
    _count(receiver)
    del receiver.poll  # SGLang's own again: the failure is known
    return KVPoll.Failed


def _count(receiver: Any) -> None:
    if not hasattr(receiver, _COUNTED):
        setattr(receiver, _COUNTED, True)
        context.target.arrivals.outcomes["aborted"] += 1


def _verdict(scheduler: Any, request: Any, receiver: Any) -> str | None:
    """What is wrong with what arrived, empty if nothing. None: not known yet."""
    manager = context.target
    forward = getattr(receiver, _HELD, None)
    if forward is None:
        arrival = arrival_of(scheduler, request, extent_of(request))
        forward = take_in(scheduler, [request], [arrival], awaited=arrival.has_records)
        forward = forward if arrival.has_records else 0
        setattr(request, _HELD, True)
        setattr(receiver, _HELD, forward)
    if not forward:
        return ""
    manager.drain()
    rows = manager.arrivals.verdict(forward)
    if rows is None:
        return None
    what = _NOT_KNOWN if manager.arrivals.has_lost(forward) else _DAMAGED
    manager.arrivals.forget(forward)
    setattr(receiver, _HELD, 0)
    return what if release().row_of(request) in rows else ""
