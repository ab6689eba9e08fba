"""KV that reached this decode server: which requests it belongs to, its check, and who waits for the outcome."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ...plan.anchor import anchor_of
from ...plan.arrival import Arrival
from ...reports.safe_text import safe_text
from ...transfer.notice import Notice
from ..anchors import update_anchors
from ..context import context
from ..forward_stream import on_forward_stream
from ..guard import attempt
from ..releases import release
from .abort import fail_transfer

logger = logging.getLogger(__name__)

_HELD = "_kv_canary_held"  # of a receiver: the forward that checks what it received; 0: not checked


def take_in(
    scheduler: Any, requests: Sequence[Any], arrivals: Sequence[Arrival], awaited: bool = False
) -> int:
    """Check `arrivals` in a step of their own. What it finds is about these requests, while they keep their rows.

    Returns the number of the forward, 0 without one.
    """
    manager = context.target
    with on_forward_stream(scheduler, manager):
        update_anchors(context.managers, requests)
        rows = [
            (arrival.row, request.rid) for arrival, request in zip(arrivals, requests, strict=True)
        ]
        origins = {arrival.row: arrival.origin for arrival in arrivals}
        attempt(_note_filled, scheduler, requests, arrivals)
        context.recorder.begin_step(rows, origins)
        try:
            return manager.note_arrivals(arrivals, awaited)
        finally:
            context.recorder.end_step()


def _note_filled(scheduler: Any, requests: Sequence[Any], arrivals: Sequence[Arrival]) -> None:
    rows = context.target.plan_input.req_to_token
    for request, arrival in zip(requests, arrivals, strict=True):
        slots = rows[arrival.row, arrival.first : arrival.length].long()
        context.slots_filled(
            slots, scheduler.page_size, "arrival", "process_decode_queue", request.rid
        )


def arrival_of(scheduler: Any, request: Any) -> Arrival:
    from sglang.srt.disaggregation.decode import _is_fake_transfer

    if _is_fake_transfer(request, scheduler.server_args):
        return as_arrival(request, Notice("", False, False))
    notice = context.notices.take(request.bootstrap_room)
    where = _address(request)
    if notice is None:
        notice = Notice(where, False, False, "it has no canary of this kind")
    if notice.why and (where, notice.why) not in context.told:
        context.told.add((where, notice.why))
        what = "the bytes of KV" if notice.has_records else "KV"
        logger.warning(
            "kv-canary: %s from the prefill server at %s is not checked on arrival: %s. Later reads are",
            what,
            where,
            safe_text(notice.why),
        )
    return as_arrival(request, notice)


def as_arrival(request: Any, notice: Notice) -> Arrival:
    """The request's tokens but the last one, whose K and V nobody has computed yet."""
    tokens = (request.origin_input_ids + request.output_ids)[: request.kv_committed_len]
    return Arrival(
        row=request.req_pool_idx,
        first=len(request.prefix_indices),
        tokens=tokens,
        anchor=anchor_of(release().namespace_of(request)),
        origin=_origin(request, notice),
        has_records=notice.has_records,
        keeps_content=notice.keeps_content,
    )


def _address(request: Any) -> str:
    """Of the prefill server, as the request names it."""
    return f"{safe_text(request.bootstrap_host)}:{request.bootstrap_port}"


def _origin(request: Any, notice: Notice) -> str:
    if not notice.server:
        return "host memory" if notice.has_records else "nowhere: nothing was transferred"
    return f"prefill server {notice.server}, room {request.bootstrap_room}"


# Requests that wait for the outcome: SGLANG_KV_CANARY_ACTION=abort


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
    where = _address(request)
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
