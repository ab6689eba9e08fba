"""Mooncake sends a request's records after its KV, into the same slots, and a notice before it reports success.

The record buffers are one more component of the state that SGLang registers and exchanges. A peer without a canary
ignores it, and is recognised by its absence.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..buffer_group import PoolKind
from ..errors import startup_error
from ..reports.safe_text import safe_text
from ..transfer.layout import TransferLayout, page_bytes, transferred_records
from ..transfer.notice import Notice, NoticeBoard
from .context import context
from .releases import release

logger = logging.getLogger(__name__)

TRANSFERS = "KV that arrives from prefill servers"
HEADER = b"KV_CANARY"  # of our messages, which SGLang's receiver reads as those of AUX_DATA
MANAGERS = ("MooncakeKVManager",)


@dataclass(frozen=True, slots=True)
class _Peer:
    """A decode rank that this rank sends to."""

    registration: Any  # SGLang's, kept to see that the peer registers anew
    # Of its record buffers that ours go to: the target's, then the draft's. None: records are not sent
    pointers: Sequence[int] | None
    notice: Notice | None  # None: it has no canary, so it is told nothing


class RecordSender:
    """Sends the records of this prefill rank. Used from the transfer's threads."""

    def __init__(self, kv_manager: Any, layout: TransferLayout) -> None:
        self._manager = kv_manager
        self._layout = layout
        target = transferred_records(context.target.groups)
        drafts = [group for draft in context.drafts for group in draft.groups]
        self._of_target = len(target)  # buffers
        self._buffers = [*target, *transferred_records(drafts)]
        self._page_bytes = page_bytes(layout.page_size)
        self._peers: dict[str, _Peer] = {}  # by session
        self._broken: str | None = None  # the first error; from then on no records are sent

    def send(
        self, session: str, source_pages: np.ndarray, target_pages: np.ndarray, kind: PoolKind
    ) -> int:
        """Send the records of these pages, int[n] each. Returns the transport's status, 0 for success."""
        pointers = self._peer(session).pointers
        if pointers is None or self._broken is not None or not len(source_pages):
            return 0
        from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous

        runs = list(zip(*group_concurrent_contiguous(source_pages, target_pages), strict=True))
        size = self._page_bytes
        blocks = [
            (records.data_ptr() + size * source[0], target + size * first[0], size * len(source))
            for (space, records), target in zip(self._buffers, pointers, strict=False)
            if space is kind
            for source, first in runs
        ]
        return self._manager._transfer_data(session, blocks)

    def announce(self, request: Any) -> None:
        """Tell the decode rank about the records of `request` (a TransferInfo), all of which were sent."""
        notice = self._peer(request.mooncake_session_id).notice
        if notice is None:
            return
        if self._broken is not None:
            notice = Notice(notice.server, False, False, self._broken)
        from sglang.srt.utils.network import NetworkAddress

        address = NetworkAddress(request.endpoint, request.dst_port)
        room = str(request.room).encode("ascii")
        whole = context.sent_chunks.complete(notice, request.room)
        message = [self._manager.AUX_DATA_HEADER, HEADER, room, whole.to_wire()]
        release().transfers.send(self._manager, address, message)

    def contain(self, error: Exception) -> None:
        """After an internal error KV goes on without records, and the decode server says that it does."""
        if self._broken is None:
            self._broken = f"an internal error of the sender's canary: {type(error).__name__}"
            logger.exception(
                "kv-canary: sending records has failed. KV is sent without them from now on, and the decode server "
                "does not check it on arrival. Please report this error."
            )

    def _peer(self, session: str) -> _Peer:
        registration = self._manager.decode_kv_args_table[session]
        peer = self._peers.get(session)
        if peer is None or peer.registration is not registration:
            peer = self._peers[session] = self._meet(registration)
        return peer

    def _meet(self, registration: Any) -> _Peer:
        where = f"{safe_text(registration.endpoint)}:{registration.dst_port}"
        numbers = registration.dst_state_dim_per_tensor
        theirs = TransferLayout.from_wire(numbers[-1]) if numbers else None
        if theirs is None:
            logger.warning(
                "kv-canary: the decode server at %s has no canary of this kind. Nothing checks the KV that it gets",
                where,
            )
            return _Peer(registration, None, None)
        name = f"{self._manager.local_ip}:{self._manager.bootstrap_port} rank {self._manager.kv_args.engine_rank}"
        obstacle = self._layout.obstacle_to(theirs)
        content = self._layout.content_obstacle_to(theirs)
        if obstacle is not None:
            logger.warning(
                "kv-canary: KV is sent to the decode server at %s without records, because %s",
                where,
                obstacle,
            )
        draft = obstacle is None and self._layout.shares_draft_with(theirs)
        notice = Notice(name, obstacle is None, content is None, obstacle or content or "", draft)
        if obstacle is not None:
            return _Peer(registration, None, notice)
        pointers = registration.dst_state_data_ptrs[-1]
        return _Peer(registration, pointers if draft else pointers[: self._of_target], notice)


def attach_sender(kv_manager: Any, layout: TransferLayout) -> None:
    """Let `kv_manager`, a MooncakeKVManager of a prefill rank, send records."""
    sender = RecordSender(kv_manager, layout)

    def send_pages(
        original: Callable[..., int], session: str, source: Any, *args: Any, **more: Any
    ) -> int:
        status = original(session, source, *args, **more)
        if status:
            return status
        return _contained(sender, 0, sender.send, session, source, args[1], PoolKind.FULL)

    def send_state(
        original: Callable[..., int], request: Any, indices: Any, *args: Any, **more: Any
    ) -> int:
        status = original(request, indices, *args, **more)
        pages = _swa_pages(kv_manager, request, indices)
        if pages is None:
            return status
        session = request.mooncake_session_id
        # SGLang ignores the status of states: pages without records are found on arrival.
        sent = _contained(sender, 0, sender.send, session, *pages, PoolKind.SWA)
        return status or sent

    def send_aux(original: Callable[..., int], request: Any, *args: Any, **more: Any) -> int:
        _contained(sender, None, sender.announce, request)
        return original(request, *args, **more)

    for name in ("send_kvcache", "send_kvcache_slice"):
        _wrap(kv_manager, name, send_pages)
    _wrap(kv_manager, "maybe_send_extra", send_state)
    _wrap(kv_manager, "send_aux", send_aux)


def attach_receiver(kv_manager: Any, board: NoticeBoard) -> None:
    """Let `kv_manager`, a MooncakeKVManager of a decode rank, put notices on `board`."""

    def receive(original: Callable[..., None], message: list[bytes]) -> None:
        if message[1] != HEADER:
            original(message)
            return
        try:
            board.put(int(message[2]), Notice.from_wire(message[3]))
        except (ValueError, IndexError) as error:
            logger.warning("kv-canary: a notice of a prefill server is ignored: %r", error)

    _wrap(kv_manager, "_handle_aux_data", receive)


def _contained(
    sender: RecordSender, otherwise: Any, function: Callable[..., Any], *args: Any
) -> Any:
    """The transfer's threads must not end with an error of ours."""
    try:
        return function(*args)
    except Exception as error:
        sender.contain(error)
        return otherwise


def _swa_pages(
    kv_manager: Any, request: Any, indices: Sequence[Any]
) -> tuple[np.ndarray, np.ndarray] | None:
    """(source, target) pages of the SWA window. None without one."""
    from sglang.srt.disaggregation.base.conn import StateType

    types = kv_manager.kv_args.state_types
    if StateType.SWA not in types:
        return None
    at = types.index(StateType.SWA)
    if at >= len(indices) or indices[at] is None or at >= len(request.dst_state_indices):
        return None
    source, target = indices[at], request.dst_state_indices[at]
    count = min(len(source), len(target))
    return (np.asarray(source[:count], np.int32), np.asarray(target[:count], np.int32))


def _wrap(kv_manager: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(kv_manager, name, None)
    if not callable(original):
        raise startup_error(f"{type(kv_manager).__name__} has no method {name}.", TRANSFERS)
    setattr(kv_manager, name, functools.partial(around, original))
