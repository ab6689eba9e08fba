"""Notices about records in NIXL's notifications, where these tell a decode rank that a transfer is done: up to 0.5.22.

A notice is part of those that the decode rank waits for. Records arrive with the KV of the same notification, or before
it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

from ..transfer.notice import Notice, NoticeBoard
from .record_sender import wrap_method

__all__ = ["attach_receiver", "room_of_last", "with_notice", "without_notice"]

# After fields of SGLang's notifications, which are separated by "_" and read by position.
_MARK = "_kvcanary:"
_MARKED = re.compile(_MARK.encode() + rb"([A-Za-z0-9+/=]*)")


def room_of_last(notification: str) -> int | None:
    """The room of a notification without which its transfer cannot succeed. None: it can, or has another form.

    The forms are ROOM_kv_CHUNK_LAST_RANK, ROOM_state_RANK, ROOM_aux and, without a page of the last chunk,
    ROOM_aux_nokv_RANK. Plain ROOM_aux counts for all ranks together, so it may come after success.
    """
    room, what, *fields = [*notification.split("_"), ""]
    is_last = what == "state" or fields[:1] == ["nokv"] or (what == "kv" and fields[1:2] == ["1"])
    return int(room) if is_last and room.isdecimal() else None


def with_notice(notification: str, notice_of: Callable[[int], Notice | None]) -> str:
    """`notification`, with a notice about its room if the transfer cannot succeed without it."""
    room = room_of_last(notification)
    if room is None:
        return notification
    notice = notice_of(room)
    if notice is None:
        return notification
    return f"{notification}{_MARK}{base64.b64encode(notice.to_wire()).decode('ascii')}"


def attach_receiver(kv_manager: Any, board: NoticeBoard) -> None:
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
