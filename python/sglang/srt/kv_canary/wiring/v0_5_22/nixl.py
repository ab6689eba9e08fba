"""NIXL from 0.5.23 on: prefill ranks tell decode ranks when transfers are done.

A notice about records is a message before that one, through the same socket. SGLang waits for the transfers of records
with its own of a chunk.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ...transfer.layout import TransferLayout
from ...transfer.notice import NoticeBoard
from ..guard import attempt_aside
from ..nixl import beside, handles_of, sender_over_nixl
from ..record_sender import Arrive, RecordSender, as_they_are, at_once, wrap_method
from ..transfer_answers import Transport
from .early_chunks import EarlyChunks

__all__ = ["NIXL", "Awaited", "announce_to_all", "hear_notices", "tells_of_success"]

_HEADER = b"KV_CANARY"  # of our messages to decode ranks
_ANY_PEER = "that a transfer goes to"  # in an error of ours before its name is known
_READS_FIRST = "handle_chunk_ready"  # of all that come to a decode rank


def tells_of_success() -> bool:
    """Whether SGLang's managers of prefill ranks tell decode ranks that a transfer over NIXL is done."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    return hasattr(CommonKVManager, _READS_FIRST)


class Awaited(threading.local):
    """Transfers that a thread has posted, and SGLang has not awaited yet: of records, and of KV beside them."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def posted(self, handle: Any) -> Arrive:
        self._handles.append(handle)
        return at_once

    def kept(self, posted: Any) -> Any:
        """What a function of SGLang's has returned that posts transfers. SGLang may await them twice."""
        self._handles += handles_of(posted)
        return posted

    def under_way(self) -> Sequence[Any]:
        return self._handles

    def with_ours(
        self, original: Callable[..., Any], handles: Sequence[Any], *args: Any, **more: Any
    ) -> Any:
        """SGLang waits for all transfers of a chunk, and fails the request with any of them.

        After a failure it waits for a limited time, and the peer keeps the slots of what may still be under way.
        """
        ours, self._handles = self._handles, []
        return original([*handles, *ours], *args, **more)


def _attach_sender(kv_manager: Any, layout: TransferLayout) -> None:
    awaited, early = Awaited(), EarlyChunks()
    sender = sender_over_nixl(kv_manager, layout, awaited.posted)

    def send_records(peer: str, source: Any, pages: Any, target: Any) -> None:
        sender.contained(peer, early.await_forward, source)
        sender.send(peer, pages, target)

    def post(post_kv: Callable[[], Any], *records: Any) -> Any:
        return beside(post_kv, functools.partial(send_records, *records), awaited.posted)

    def queue(original: Callable[..., Any], room: int, pages: Any, *args: Any, **more: Any) -> Any:
        attempt_aside(early.note, pages, more.get("wait_event"))
        return original(room, pages, *args, **more)

    def send_kv(
        original: Callable[..., Any], peer: str, source: Any, *args: Any, **more: Any
    ) -> Any:
        pages = as_they_are(source)
        post_kv = functools.partial(original, peer, pages, *args, **more)
        return post(post_kv, peer, source, pages, args[1])

    def send_slice(original: Callable[..., Any], peer: str, source: Any, target: Any) -> Any:
        pages = as_they_are(source)
        post_kv = functools.partial(original, peer, pages, target)
        return post(post_kv, peer, source, pages, target)

    def send_state(
        original: Callable[..., Any], peer: str, indices: Any, *args: Any, **more: Any
    ) -> Any:
        sender.send_states(peer, indices, args[1])
        return original(peer, indices, *args, **more)

    def conclude(original: Callable[..., Any], **what: Any) -> Any:
        from sglang.srt.disaggregation.base import KVPoll

        if what["status"] == KVPoll.Success:
            announce_to_all(kv_manager, sender, what["bootstrap_room"])
        return original(**what)

    wrap_method(kv_manager, "add_transfer_request", queue)
    wrap_method(kv_manager, "_await_handles", awaited.with_ours)
    wrap_method(kv_manager, "send_kvcache", send_kv)
    wrap_method(kv_manager, "send_kvcache_slice", send_slice)
    wrap_method(kv_manager, "maybe_send_extra", send_state)
    wrap_method(kv_manager, "conclude_transfer", conclude)


def announce_to_all(kv_manager: Any, sender: RecordSender, room: int) -> None:
    """Tell the decode ranks of `room` about its records. SGLang tells them then how it has ended."""
    sender.contained(_ANY_PEER, _announce_to_each, kv_manager, sender, room)


def _announce_to_each(kv_manager: Any, sender: RecordSender, room: int) -> None:
    for info in list(kv_manager.transfer_infos.get(room, {}).values()):
        if not info.is_dummy:
            sender.contained(info.agent_name, _announce, kv_manager, sender, room, info)


def _announce(kv_manager: Any, sender: RecordSender, room: int, info: Any) -> None:
    """Tell a decode rank of `room` (`info`) about its records. All of them were sent."""
    notice = sender.notice(info.agent_name, room)
    if notice is None:
        return
    from sglang.srt.utils.network import NetworkAddress

    address = NetworkAddress(info.endpoint, info.dst_port)
    message = [_HEADER, str(room).encode("ascii"), notice.to_wire()]
    kv_manager._send_multipart_locked(address.to_tcp(), message, is_ipv6=address.is_ipv6)


def _attach_receiver(kv_manager: Any, board: NoticeBoard) -> None:
    hear_notices(kv_manager, board, _READS_FIRST)


def hear_notices(kv_manager: Any, board: NoticeBoard, reads_first: str) -> None:
    """`reads_first`: a method that gets each message. It says whether the message was for it."""

    def receive(original: Callable[..., bool], message: Sequence[bytes]) -> bool:
        if message[0] != _HEADER:
            return original(message)
        board.put_received(message[1:])
        return True

    wrap_method(kv_manager, reads_first, receive)


NIXL = Transport(_attach_sender, _attach_receiver)
