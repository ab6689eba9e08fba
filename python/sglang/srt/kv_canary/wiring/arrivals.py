"""KV that reached this decode server: which requests it belongs to, and its check."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..plan.anchor import anchor_of
from ..plan.arrival import Arrival
from ..plan.upload import upload
from ..reports.origin import Origin
from ..reports.safe_text import safe_text
from ..runner.manager import CanaryManager
from ..transfer.notice import NO_TOKEN, Notice
from .adapters import knows_adapter
from .anchors import update_anchors
from .context import context
from .forward_stream import on_forward_stream
from .guard import attempt
from .images import image_numbers
from .releases import release
from .speculative import mark_unfilled

logger = logging.getLogger(__name__)
_SAID_AT = tuple(100**i for i in range(6))
_NO_DRAFT = "no records of the draft model's KV come from the"


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
        origins = {a.row: Origin(a.origin, a.chunks) for a in arrivals}
        attempt(_note_filled, scheduler, requests, arrivals)
        step = context.recorder.begin_step(rows, origins)
        try:
            forward = manager.note_arrivals(arrivals, awaited)
            _note_next_tokens(manager, arrivals)
            # After the target's: the chains of drafts step from its records.
            for draft in context.drafts:
                _take_in_draft(draft, arrivals)
            step.is_complete = manager.completion()
            return forward
        finally:
            context.recorder.end_step()


def _note_next_tokens(manager: CanaryManager, arrivals: Sequence[Arrival]) -> None:
    """SGLang sends the first token of an answer apart from the KV. The request's first decode is compared with it."""
    following = [
        (a.row, a.next_token) for a in arrivals if a.has_records and a.next_token is not None
    ]
    if following:
        device = manager.plan_input.req_to_token.device
        rows, tokens = (upload(list(side), device) for side in zip(*following, strict=True))
        manager.note_next_tokens(rows, tokens)


def _take_in_draft(manager: CanaryManager, arrivals: Sequence[Arrival]) -> None:
    """Without records nobody knows whether the draft model's KV came. It counts as not computed, as in SGLang."""
    known = [arrival.of_draft() for arrival in arrivals if arrival.has_draft_records]
    if known:
        manager.note_arrivals(known)
    rows = manager.plan_input.req_to_token
    for arrival in arrivals:
        if not arrival.has_draft_records:
            mark_unfilled(manager, rows[arrival.row, arrival.first : arrival.length].long())


def _note_filled(scheduler: Any, requests: Sequence[Any], arrivals: Sequence[Arrival]) -> None:
    rows = context.target.plan_input.req_to_token
    for request, arrival in zip(requests, arrivals, strict=True):
        slots = rows[arrival.row, arrival.first : arrival.length].long()
        context.slots_filled(
            slots, scheduler.page_size, "arrival", "process_decode_queue", request.rid
        )


class Extent(NamedTuple):
    """Tokens that have arrived."""

    first: int
    end: int  # one after the last
    is_computed_again: bool = False  # SGLang goes on after the token that it had before


def extent_of(request: Any) -> Extent:
    """Of what has arrived, until SGLang schedules `request`."""
    known = release().transfers
    return Extent(known.cached(request), known.committed(request), known.is_computed_again(request))


def arrival_of(scheduler: Any, request: Any, extent: Extent) -> Arrival:
    if release().transfers.is_fake(request, scheduler.server_args):
        return as_arrival(request, Notice("", False, False), extent)
    notice = context.notices.take(request.bootstrap_room)
    where = address_of(request)
    if notice is None:
        notice = Notice(where, False, False, "it has no canary of this kind")
    if notice.has_records:
        notice = _comparable(scheduler, request, notice)
    if context.drafts and not notice.has_draft_records and (count := news(where, _NO_DRAFT)):
        logger.warning(
            "kv-canary: %s prefill server at %s. Its slots are not checked until the draft model writes them "
            "(requests so far: %d)",
            _NO_DRAFT,
            where,
            count,
        )
    if notice.why and (count := news(where, notice.why)):
        what = "the bytes of KV" if notice.has_records else "KV"
        logger.warning(
            "kv-canary: %s from the prefill server at %s is not checked on arrival: %s. Later reads are "
            "(requests so far: %d)",
            what,
            where,
            safe_text(notice.why),
            count,
        )
    return as_arrival(request, notice, extent)


def _comparable(scheduler: Any, request: Any, notice: Notice) -> Notice:
    """`notice` without records where this server expects others of the same KV."""
    why = ""
    if not knows_adapter(request):
        why = "this server does not know the name of the request's LoRA adapter"
    elif images := image_numbers(scheduler.model_config, request.origin_input_ids):
        if notice.images is None:
            why = "it does not say how it numbers the request's images"
        elif notice.images != images:
            why = "the servers number its images in different ways"
    elif notice.images:
        why = "there it has images, and none here"
    return replace(notice, has_records=False, has_draft_records=False, why=why) if why else notice


def news(peer: str, what: str) -> int:
    """How many requests this was so for, if it is time to say it: at the first one, and at each hundredfold. Or 0."""
    # Transfers' threads ask, too. Each of the two calls is one step for them, so no number comes twice.
    count = next(context.told.setdefault((peer, what), itertools.count(1)))
    return count if count in _SAID_AT else 0


def as_arrival(request: Any, notice: Notice, extent: Extent) -> Arrival:
    """The request's tokens but the last one, whose K and V nobody has computed yet."""
    tokens = _first_tokens(request, extent.end)
    return Arrival(
        row=release().row_of(request),
        first=extent.first,
        tokens=tokens,
        anchor=anchor_of(release().namespace_of(request)),
        origin=_origin(request, notice),
        has_records=notice.has_records,
        keeps_content=notice.keeps_content,
        has_draft_records=notice.has_draft_records,
        keeps_draft_content=notice.keeps_draft_content,
        chunks=notice.chunks,
        next_token=_next_token(request, notice, extent),
        lost_states=notice.lost_states,
    )


def _first_tokens(request: Any, count: int) -> array[int]:
    """An array is read several times, at a quarter of a list's cost. Each further list would touch all tokens again."""
    prompt = request.origin_input_ids
    tokens = array("q", prompt if len(prompt) <= count else prompt[:count])
    tokens.extend(array("q", request.output_ids[: count - len(tokens)]))
    return tokens


def _next_token(request: Any, notice: Notice, extent: Extent) -> int | None:
    """A request that resumes goes on with its own token, not with what the prefill server samples then."""
    follows = extent.end == len(request.origin_input_ids) and not extent.is_computed_again
    return notice.first_token if follows and notice.first_token != NO_TOKEN else None


def address_of(request: Any) -> str:
    """Of the prefill server, as the request names it."""
    return f"{safe_text(request.bootstrap_host)}:{request.bootstrap_port}"


def _origin(request: Any, notice: Notice) -> str:
    if not notice.server:
        return "host memory" if notice.has_records else "nowhere: nothing was transferred"
    named = f", request {notice.request}" if notice.request else ""
    return f"prefill server {notice.server}, room {request.bootstrap_room}{named}"
