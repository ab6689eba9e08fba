"""KV that reached this decode server: which requests it belongs to, and its check."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..plan.anchor import anchor_of
from ..plan.arrival import Arrival
from ..reports.safe_text import safe_text
from ..transfer.notice import Notice
from .anchors import update_anchors
from .context import context
from .forward_stream import on_forward_stream
from .guard import attempt
from .releases import release

logger = logging.getLogger(__name__)


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
    if release().transfers.is_fake(request, scheduler.server_args):
        return as_arrival(request, Notice("", False, False))
    notice = context.notices.take(request.bootstrap_room)
    where = address_of(request)
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
    known = release().transfers
    tokens = (request.origin_input_ids + request.output_ids)[: known.committed(request)]
    return Arrival(
        row=release().row_of(request),
        first=known.cached(request),
        tokens=list(tokens),
        anchor=anchor_of(release().namespace_of(request)),
        origin=_origin(request, notice),
        has_records=notice.has_records,
        keeps_content=notice.keeps_content,
    )


def address_of(request: Any) -> str:
    """Of the prefill server, as the request names it."""
    return f"{safe_text(request.bootstrap_host)}:{request.bootstrap_port}"


def _origin(request: Any, notice: Notice) -> str:
    if not notice.server:
        return "host memory" if notice.has_records else "nowhere: nothing was transferred"
    return f"prefill server {notice.server}, room {request.bootstrap_room}"
