"""NIXL in this release: the decode rank learns from notifications of NIXL that a transfer is done.

A notice about records is part of those that it waits for. Records arrive with the KV of the same notification.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Callable
from typing import Any

from ...transfer.layout import TransferLayout
from ...transfer.notice import Notice, NoticeBoard
from ..nixl import Passenger, sender_over_nixl, waiting_in
from ..record_sender import wrap_method
from ..transfer_answers import Transport

__all__ = ["NIXL", "with_notice", "without_notice"]

# After fields of SGLang's notifications, which are separated by "_" and read by position.
_MARK = "_kvcanary:"
_MARKED = re.compile(_MARK.encode() + rb"([A-Za-z0-9+/=]*)")


def _attach_sender(kv_manager: Any, layout: TransferLayout) -> None:
    agent = kv_manager.agent
    sender = sender_over_nixl(kv_manager, layout, waiting_in(agent))
    passenger = Passenger(agent)

    def noted(peer: str, notification: str) -> str:
        notice_of = functools.partial(sender.notice, peer)
        return sender.contained(peer, with_notice, notification, notice_of) or notification

    def send_pages(
        original: Callable[..., Any], peer: str, source: Any, *args: Any, **more: Any
    ) -> Any:
        pointers, target, gpu, notification, *rest = args
        sides = sender.sides(peer, source, target)
        sent = (peer, source, pointers, target, gpu, noted(peer, notification), *rest)
        post_kv = functools.partial(original, *sent, **more)
        if sides is None:
            return post_kv()
        otherwise = functools.partial(sender.send, peer, source, target)
        return passenger.carry(post_kv, sides, otherwise)

    def send_state(
        original: Callable[..., Any], peer: str, indices: Any, *args: Any, **more: Any
    ) -> Any:
        pointers, targets, gpu, notification, *rest = args
        sender.send_states(peer, indices, targets)
        notification = noted(peer, notification)
        return original(peer, indices, pointers, targets, gpu, notification, *rest, **more)

    def send_aux(original: Callable[..., Any], peer: str, *args: Any) -> Any:
        *rest, notification = args
        return original(peer, *rest, noted(peer, notification))

    for name in ("send_kvcache", "send_kvcache_slice"):
        wrap_method(kv_manager, name, send_pages)
    wrap_method(kv_manager, "maybe_send_extra", send_state)
    wrap_method(kv_manager, "send_aux", send_aux)


def with_notice(notification: str, notice_of: Callable[[int], Notice | None]) -> str:
    """`notification`, with a notice about its room if the transfer cannot succeed without it.

    The forms are ROOM_kv_CHUNK_LAST_RANK, ROOM_state_RANK, ROOM_aux and, without a page of the last chunk,
    ROOM_aux_nokv_RANK. Plain ROOM_aux counts for all ranks together, so it may come after success.
    """
    room, what, *fields = notification.split("_")
    if what != "state" and fields[:1] != ["nokv"] and not (what == "kv" and fields[1] == "1"):
        return notification
    notice = notice_of(int(room))
    if notice is None:
        return notification
    return f"{notification}{_MARK}{base64.b64encode(notice.to_wire()).decode('ascii')}"


def _attach_receiver(kv_manager: Any, board: NoticeBoard) -> None:
    def new_notifications(original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        news = original(*args, **more)
        return {peer: [without_notice(message, board) for message in news[peer]] for peer in news}

    wrap_method(kv_manager.agent, "get_new_notifs", new_notifications)


def without_notice(message: bytes, board: NoticeBoard) -> bytes:
    """`message` as SGLang sent it. Its notice goes to `board`."""
    found = _MARKED.search(message)
    if found is None:
        return message
    board.put_received((message.partition(b"_")[0], _decoded(found[1])))
    return message[: found.start()] + message[found.end() :]


def _decoded(text: bytes) -> bytes:
    """Nothing for what is not base64: no notice either."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


NIXL = Transport(_attach_sender, _attach_receiver)
