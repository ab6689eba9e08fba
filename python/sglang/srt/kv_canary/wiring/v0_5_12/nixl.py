"""NIXL writes the records of pages before their KV. A notice about them is part of the notification that follows.

SGLang polls its transfers later, and NIXL's notification of one says nothing about another. So records have arrived
before the transfer of KV, or of a state, begins whose notification counts for success.
"""

from __future__ import annotations

import base64
import functools
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...transfer.layout import TransferLayout
from ...transfer.notice import Notice, NoticeBoard
from ..record_sender import Block, RecordSender, wrap_method
from ..transfer_answers import Transport

__all__ = ["NIXL", "with_notice", "without_notice"]

logger = logging.getLogger(__name__)

# Between fields of SGLang's notifications, which are separated by "_". SGLang reads its own fields by position.
_MARK = "_kvcanary:"
_MARKED = re.compile(_MARK.encode() + rb"([A-Za-z0-9+/=]*)")
_POLL_S = 0.0  # as SGLang polls its own transfers


class _TransferFailed(RuntimeError):
    """SGLang fails the request, as it does when NIXL reports an error of a transfer of KV."""


def _attach_sender(kv_manager: Any, layout: TransferLayout) -> None:
    from sglang.srt.disaggregation.nixl.conn import _NIXL_TRANSPORT_ERRORS

    def write(peer: str, blocks: Sequence[Block]) -> int:
        _write(kv_manager, peer, blocks)
        return 0

    sender = RecordSender(kv_manager, layout, write, (_TransferFailed, *_NIXL_TRANSPORT_ERRORS))

    def noted(peer: str, notification: str) -> str:
        notice_of = functools.partial(sender.notice, peer)
        return sender.contained(with_notice, notification, notice_of) or notification

    def send_pages(
        original: Callable[..., Any], peer: str, source: Any, *args: Any, **more: Any
    ) -> Any:
        pointers, target, gpu, notification, *rest = args
        sender.send(peer, source, target)
        notification = noted(peer, notification)
        return original(peer, source, pointers, target, gpu, notification, *rest, **more)

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


def _write(kv_manager: Any, peer: str, blocks: Sequence[Block]) -> None:
    """Returns when `blocks` have arrived."""
    here, there = kv_manager.kv_args.gpu_id, kv_manager.decode_kv_args_table[peer].gpu_id
    agent = kv_manager.agent
    sources = [(source, size, here) for source, _, size in blocks]
    targets = [(target, size, there) for _, target, size in blocks]
    # SGLang registers all states as memory of the device.
    sides = (agent.get_xfer_descs(np.array(side, np.uint64), "VRAM") for side in (sources, targets))
    handle = agent.initialize_xfer("WRITE", *sides, peer)
    state = agent.transfer(handle)
    while state not in ("DONE", "ERR"):
        time.sleep(_POLL_S)
        state = agent.check_xfer_state(handle)
    if state == "ERR":
        raise _TransferFailed("kv-canary: NIXL reports an error of a transfer of records")
    agent.release_xfer_handle(handle)


def with_notice(notification: str, notice_of: Callable[[int], Notice | None]) -> str:
    """`notification`, with a notice if the transfer cannot succeed without it.

    The forms are ROOM_kv_CHUNK_LAST_RANK, ROOM_state_RANK, ROOM_aux and, without a page of the last chunk,
    ROOM_aux_nokv_RANK. Plain ROOM_aux counts for all ranks together, so it may be the last of all.
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
    try:
        room = int(message.partition(b"_")[0])
        board.put(room, Notice.from_wire(base64.b64decode(found[1], validate=True)))
    except ValueError as error:
        logger.warning("kv-canary: a notice of a prefill server is ignored: %r", error)
    return message[: found.start()] + message[found.end() :]


NIXL = Transport(_attach_sender, _attach_receiver)
