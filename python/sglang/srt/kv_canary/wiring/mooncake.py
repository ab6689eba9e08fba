"""Mooncake writes records beside a request's KV, and a message tells about them before it reports success."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..reports.safe_text import safe_text
from ..transfer.layout import TransferLayout
from ..transfer.notice import NoticeBoard
from ..transfer.recent_rooms import RecentRooms
from .arrivals import news
from .context import context
from .record_sender import Arrive, RecordSender, Sides, as_they_are, wrap_method
from .releases import release
from .transfer_answers import Transport

__all__ = ["MOONCAKE"]

logger = logging.getLogger(__name__)

_FAILED = -1  # a status with which SGLang fails the transfer
_LOST = "Mooncake has not sent states of linear-attention layers"
HEADER = b"KV_CANARY"  # of our messages, which SGLang's receiver reads as those of AUX_DATA


def _attach_sender(kv_manager: Any, layout: TransferLayout) -> None:
    def post(session: str, sides: Sides) -> Arrive:
        """Mooncake's call returns when they have arrived."""
        here, there = sides
        columns = (column.tolist() for column in (here[:, 0], there[:, 0], here[:, 1]))
        status = kv_manager._transfer_data(session, list(zip(*columns, strict=True)))
        return lambda: status

    sender = RecordSender(kv_manager, layout, post)
    # Sessions and rooms: records of states have not come, or without the states
    unsent, alone = RecentRooms(), RecentRooms()

    def send_pages(
        original: Callable[..., int], session: str, source: Any, *args: Any, **more: Any
    ) -> int:
        pages = as_they_are(source)
        # Records first: SGLang may free a slot while its KV is on the way, which harms nobody until it is used again.
        status = sender.send(session, pages, args[1])
        return status or original(session, pages, *args, **more)

    def send_state(
        original: Callable[..., int], request: Any, indices: Any, *args: Any, **more: Any
    ) -> int:
        session = request.mooncake_session_id
        ignored = release().transfers.ignores_lost_states
        # Records first: if the request ends in between, they must not come alone, into slots of another one.
        if status := sender.send_states(session, indices, request.dst_state_indices):
            if ignored:
                unsent.mark((session, request.room))
            return status
        status = original(request, indices, *args, **more)
        if status and ignored:
            # Of pages the peer must know it. What it has of linear attention has no records.
            alone.mark((session, request.room))
            sender.contained(session, _say_states_are_lost, kv_manager, request)
        return status

    def send_aux(original: Callable[..., int], request: Any, *args: Any, **more: Any) -> int:
        session = request.mooncake_session_id
        must_fail = context.sent_chunks.let_go(request.room)
        of_request = session, request.room
        lost = alone.take(of_request)
        if unsent.take(of_request):
            return _FAILED
        tells = sender.contained(session, _announce, kv_manager, sender, request, lost)
        if must_fail and not (tells or release().transfers.fails_damaged):
            return _FAILED
        return original(request, *args, **more)

    for name in ("send_kvcache", "send_kvcache_slice"):
        wrap_method(kv_manager, name, send_pages)
    wrap_method(kv_manager, "maybe_send_extra", send_state)
    wrap_method(kv_manager, "send_aux", send_aux)


def _say_states_are_lost(kv_manager: Any, request: Any) -> None:
    from sglang.srt.disaggregation.base.conn import StateType

    where = f"{safe_text(request.endpoint)}:{request.dst_port}"
    lost = StateType.MAMBA in kv_manager.kv_args.state_types
    if lost and (count := news(where, _LOST)):
        logger.error(
            "kv-canary: %s to the decode server at %s. SGLang does not look at that. Answers go on from what other "
            "requests left in their slots, and nothing checks it (requests so far: %d)",
            _LOST,
            where,
            count,
        )


def _announce(kv_manager: Any, sender: RecordSender, request: Any, lost_states: bool) -> bool:
    """Tell the decode rank about the records of `request` (a TransferInfo). Returns whether it heeds damage."""
    notice = sender.notice(request.mooncake_session_id, request.room)
    if notice is None:
        return False
    notice = replace(notice, lost_states=lost_states)
    from sglang.srt.utils.network import NetworkAddress

    address = NetworkAddress(request.endpoint, request.dst_port)
    room = str(request.room).encode("ascii")
    message = [kv_manager.AUX_DATA_HEADER, HEADER, room, notice.to_wire()]
    release().transfers.send(kv_manager, address, message)
    return sender.heeds_damage(request.mooncake_session_id)


def _attach_receiver(kv_manager: Any, board: NoticeBoard) -> None:
    def receive(original: Callable[..., None], message: list[bytes]) -> None:
        if message[1] == HEADER:
            board.put_received(message[2:])
        else:
            original(message)

    wrap_method(kv_manager, "_handle_aux_data", receive)


MOONCAKE = Transport(_attach_sender, _attach_receiver)
