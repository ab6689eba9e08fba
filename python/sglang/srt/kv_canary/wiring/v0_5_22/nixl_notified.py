"""NIXL on 0.5.22: the decode rank learns from notifications of NIXL that a transfer is done.

They come with KV, which goes in prepared transfers that records cannot join. The last of them make the transfer
succeed. So records arrive before SGLang posts the last chunk. Those of others follow their KV. SGLang waits for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...transfer.layout import TransferLayout
from ...transfer.notice import NoticeBoard
from ..containment.abort import message
from ..context import context
from ..guard import attempt_aside
from ..nixl import beside, sender_over_nixl, waiting_in
from ..nixl_notices import attach_receiver, room_of_last, with_notice
from ..record_sender import Arrive, as_they_are, wrap_method
from ..transfer_answers import Transport
from .early_chunks import EarlyChunks
from .nixl import Awaited, announce_to_all, hear_notices

__all__ = ["NIXL_NOTIFIED"]


# Of the messages to a decode rank: what gets all of them that are not about staging buffers
_READS_FIRST = "handle_abort_ack_message"


class _ReadDamage(RuntimeError):
    """SGLang fails the request, and tells the decode rank why."""


def _attach_sender(kv_manager: Any, layout: TransferLayout) -> None:
    awaited, early = Awaited(), EarlyChunks()
    wait = waiting_in(kv_manager.agent, awaited.under_way)

    def posted(handle: Any) -> Arrive:
        """SGLang waits for it, too. After an error, of KV as well, it alone does so, for a limited time."""
        awaited.posted(handle)
        return wait(handle)

    sender = sender_over_nixl(kv_manager, layout, posted)
    _note_events(early)

    def refuse_damaged(notification: str) -> None:
        """Raises _ReadDamage if the request of the room must not succeed."""
        room = room_of_last(notification)
        if room is not None and (why := context.sent_chunks.let_go(room)):
            announce_to_all(kv_manager, sender, room)
            raise _ReadDamage(message(why))

    def noted(peer: str, notification: str) -> str:
        """After the records that the notice tells of: it says whether they were sent."""
        notice_of = functools.partial(sender.notice, peer)
        return sender.contained(peer, with_notice, notification, notice_of) or notification

    def start_records(peer: str, source: Any, pages: Any, target: Any) -> Arrive:
        sender.contained(peer, early.await_forward, source)
        return sender.start(peer, pages, target)

    def send_pages(
        post: Callable[[Any, str], Any], peer: str, source: Any, target: Any, notification: str
    ) -> Any:
        pages = as_they_are(source)
        start = functools.partial(start_records, peer, source, pages, target)
        if room_of_last(notification) is None:
            post_kv = functools.partial(post, pages, notification)
            return beside(post_kv, start, awaited.posted)
        refuse_damaged(notification)
        arrive = start()
        arrive()
        return awaited.kept(post(pages, noted(peer, notification)))

    def send_kv(
        original: Callable[..., Any],
        peer: str,
        source: Any,
        pointers: Any,
        target: Any,
        gpu: int,
        notification: str,
        **more: Any,
    ) -> Any:
        def post(pages: Any, noted: str) -> Any:
            return original(peer, pages, pointers, target, gpu, noted, **more)

        return send_pages(post, peer, source, target, notification)

    def send_slice(
        original: Callable[..., Any], peer: str, source: Any, target: Any, notification: str
    ) -> Any:
        def post(pages: Any, noted: str) -> Any:
            return original(peer, pages, target, noted)

        return send_pages(post, peer, source, target, notification)

    def send_state(
        original: Callable[..., Any], peer: str, indices: Any, *args: Any, **more: Any
    ) -> Any:
        pointers, targets, gpu, notification, *rest = args
        refuse_damaged(notification)
        sender.send_states(peer, indices, targets)
        told = noted(peer, notification)
        return awaited.kept(original(peer, indices, pointers, targets, gpu, told, *rest, **more))

    def send_aux(original: Callable[..., Any], peer: str, *args: Any) -> Any:
        *rest, notification = args
        refuse_damaged(notification)
        return awaited.kept(original(peer, *rest, noted(peer, notification)))

    wrap_method(kv_manager, "_await_handles", awaited.with_ours)
    wrap_method(kv_manager, "send_kvcache", send_kv)
    wrap_method(kv_manager, "send_kvcache_slice", send_slice)
    wrap_method(kv_manager, "maybe_send_extra", send_state)
    wrap_method(kv_manager, "send_aux", send_aux)


def _attach_receiver(kv_manager: Any, board: NoticeBoard) -> None:
    attach_receiver(kv_manager, board)
    # About damage, before SGLang's message that the request has failed
    hear_notices(kv_manager, board, _READS_FIRST)


def _note_events(early: EarlyChunks) -> None:
    """SGLang leaves the event with the sender of the request, which queues the chunk without it."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVSender

    queue = NixlKVSender.send

    @functools.wraps(queue)
    def send(kv_sender: Any, pages: Any, *args: Any, **more: Any) -> Any:
        event = kv_sender.__dict__.pop("_early_send_wait_event", None)
        attempt_aside(early.note, pages, event)
        return queue(kv_sender, pages, *args, **more)

    NixlKVSender.send = send


NIXL_NOTIFIED = Transport(_attach_sender, _attach_receiver)
