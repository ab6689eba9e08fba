"""NIXL in this release: the decode rank learns from notifications of NIXL that a transfer is done.

A notice about records is part of those that it waits for. Records arrive with the KV of the same notification.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...transfer.layout import TransferLayout
from ..nixl import Passenger, send_promised, sender_over_nixl, waiting_in
from ..nixl_notices import attach_receiver, room_of_last, with_notice
from ..record_sender import as_they_are, wrap_method
from ..transfer_answers import Transport

__all__ = ["NIXL"]


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
        pages = as_they_are(source)
        sides = sender.sides(peer, pages, target)
        sent = (peer, pages, pointers, target, gpu, noted(peer, notification), *rest)
        post_kv = functools.partial(original, *sent, **more)
        if sides is None:
            return post_kv()
        if room_of_last(notification) is None:  # the peer is told with the last chunk
            otherwise = functools.partial(sender.send, peer, pages, target)
        else:
            otherwise = functools.partial(send_promised, sender, peer, sides)
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


NIXL = Transport(_attach_sender, attach_receiver)
