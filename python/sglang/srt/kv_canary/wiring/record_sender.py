"""Sends the records of a prefill rank with its KV, into the same slots. A transport says how it writes them.

The record buffers are one more component of the state that SGLang registers and exchanges. A peer without a canary
ignores it, and is recognised by its absence.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..errors import startup_error
from ..host_code import HOST
from ..pool_kind import PoolKind
from ..reports.safe_text import safe_text
from ..transfer.layout import TransferLayout, page_bytes, transferred_records
from ..transfer.notice import Notice
from .context import context
from .late_work import await_content

__all__ = ["TRANSFERS", "Arrive", "RecordSender", "Sides", "as_they_are", "at_once", "wrap_method"]

logger = logging.getLogger(__name__)

TRANSFERS = "KV that arrives from prefill servers"
Arrive = Callable[
    [], int
]  # waits until blocks have arrived. Returns the transport's status, 0 for success
# By SGLang's StateType. Records go with the bytes that they are of: those of index keys with the last chunk
_KIND_OF_STATE = {"swa": PoolKind.SWA, "nsa": PoolKind.INDEXER, "dsa": PoolKind.INDEXER}
T = TypeVar("T")
Sides = tuple[np.ndarray, np.ndarray]  # memory here and at the peer, see `host_code.describe_pages`


@dataclass(frozen=True, slots=True)
class _Peer:
    """A decode rank that this rank sends to."""

    registration: Any  # SGLang's, kept to see that the peer registers anew
    # Addresses of record buffers (here, there) by kind of the group. None: records are not sent
    bases: Mapping[PoolKind, tuple[tuple[int, int], ...]] | None
    devices: tuple[int, int]  # of the memory here and there
    notice: Notice | None  # None: it has no canary, so it is told nothing
    heeds_damage: bool = False  # it fails requests whose notice says why


class RecordSender:
    """Sends the records of this prefill rank. Used from the transfer's threads.

    `post(peer, sides)` starts to write: `sides` are uint64[n, 3] of (address, bytes, device) here, and the same at the
    peer. It and what it returns may raise one of `transport_errors`, which SGLang handles as those of its own
    transfers. `devices_of`: numbers of the memory's devices (here, at the peer), of a peer's registration. Peers are
    named as in SGLang's `decode_kv_args_table`.
    """

    def __init__(
        self,
        kv_manager: Any,
        layout: TransferLayout,
        post: Callable[[str, Sides], Arrive],
        transport_errors: tuple[type[Exception], ...] = (),
        devices_of: Callable[[Any], tuple[int, int]] = lambda _: (0, 0),
    ) -> None:
        self._manager = kv_manager
        self._layout = layout
        self._post = post
        self._transport_errors = transport_errors
        self._devices_of = devices_of
        target = transferred_records(context.target.groups)
        drafts = [group for draft in context.drafts for group in draft.groups]
        self._of_target = len(target)  # buffers
        self._buffers = [*target, *transferred_records(drafts)]
        self._page_bytes = page_bytes(layout.page_size)
        self._peers: dict[str, _Peer] = {}  # by name
        # Peer -> its first error. It stays, so that no request goes with a part of its records
        self._broken: dict[str, str] = {}

    def sides(self, peer: str, source_pages: np.ndarray, target_pages: np.ndarray) -> Sides | None:
        """What `start` would write, for a transfer that SGLang posts, see `post`. None: nothing."""
        pages = (source_pages, target_pages, PoolKind.FULL)
        return self.contained(peer, self._sides, peer, *pages)

    def start(self, peer: str, source_pages: np.ndarray, target_pages: np.ndarray) -> Arrive:
        """Start to send the records of these full pages, int[n] each. The transport may wait for them elsewhere."""
        pages = (source_pages, target_pages, PoolKind.FULL)
        return self.contained(peer, self._start, peer, *pages) or at_once

    def send(self, peer: str, source_pages: np.ndarray, target_pages: np.ndarray) -> int:
        """The same, until they have arrived. Returns the transport's status, 0 for success."""
        return self.start(peer, source_pages, target_pages)()

    def send_sides(self, peer: str, sides: Sides) -> int | None:
        """Send what `sides` returned. The transport's status. None after an error of ours: they have not gone."""
        arrive = self.contained(peer, self._post, peer, sides)
        return None if arrive is None else arrive()

    def send_states(self, peer: str, indices: Sequence[Any], targets: Sequence[Any]) -> int:
        """The same for the pages of states. `indices`, `targets`: of each of SGLang's state components."""
        return self.contained(peer, self._send_states, peer, indices, targets) or 0

    def notice(self, peer: str, room: int) -> Notice | None:
        """What the decode rank must know of the records of `room`, all of which were sent. None: it has no canary."""
        notice = self._peer(peer).notice
        if notice is not None and peer in self._broken:
            notice = Notice(notice.server, False, False, self._broken[peer])
        context.sent_chunks.let_go(room)
        return notice and context.sent_chunks.complete(notice, room)

    def heeds_damage(self, peer: str) -> bool:
        """Whether the decode rank fails a request whose notice says why."""
        return self._peer(peer).heeds_damage

    def contained(self, peer: str, function: Callable[..., T], *args: Any) -> T | None:
        """The result of `function`. None after an error of ours, with which the transfer's threads must not end.

        KV goes on to `peer` without records then, which that server says. Other peers go on to get them.
        """
        try:
            return function(*args)
        except self._transport_errors:
            raise
        except Exception as error:
            if peer not in self._broken:
                said = f"an internal error of the sender's canary: {type(error).__name__}"
                self._broken[peer] = said
                logger.exception(
                    "kv-canary: sending records to the decode rank %s has failed. Its KV is sent without them from now "
                    "on, and it does not check it on arrival. Please report this error.",
                    safe_text(peer),
                )
            return None

    def _start(
        self, peer: str, source_pages: np.ndarray, target_pages: np.ndarray, kind: PoolKind
    ) -> Arrive:
        sides = self._sides(peer, source_pages, target_pages, kind)
        return at_once if sides is None else self._post(peer, sides)

    def _sides(
        self, name: str, source_pages: np.ndarray, target_pages: np.ndarray, kind: PoolKind
    ) -> Sides | None:
        peer = self._peer(name)
        if peer.bases is None or name in self._broken or not len(source_pages):
            return None
        bases = peer.bases[kind]
        await_content()
        described = HOST.describe_pages(
            source_pages, target_pages, bases, self._page_bytes, peer.devices
        )
        here, there = [np.frombuffer(side, np.uint64).reshape(-1, 3) for side in described]
        return (here, there) if len(here) else None

    def _send_states(self, peer: str, indices: Sequence[Any], targets: Sequence[Any]) -> int:
        status = 0
        types = self._manager.kv_args.state_types
        for state, here, there in zip(types, indices, targets, strict=False):
            kind = _KIND_OF_STATE.get(state.value)
            if kind is None or here is None:
                continue
            count = min(len(here), len(there))
            pages = (np.asarray(side[:count], np.int32) for side in (here, there))
            status = status or self._start(peer, *pages, kind)()
        return status

    def _peer(self, name: str) -> _Peer:
        registration = self._manager.decode_kv_args_table[name]
        peer = self._peers.get(name)
        if peer is None or peer.registration is not registration:
            peer = self._peers[name] = self._meet(registration)
        return peer

    def _meet(self, registration: Any) -> _Peer:
        where = f"{safe_text(registration.endpoint)}:{registration.dst_port}"
        devices = self._devices_of(registration)
        numbers = registration.dst_state_dim_per_tensor
        theirs = TransferLayout.from_wire(numbers[-1]) if numbers else None
        if theirs is None:
            logger.warning(
                "kv-canary: the decode server at %s has no canary of this kind. Nothing checks the KV that it gets",
                where,
            )
            return _Peer(registration, None, devices, None)
        manager = self._manager
        name = f"{manager.local_ip}:{manager.bootstrap_port} rank {manager.kv_args.engine_rank}"
        dp_rank = None if context.sink is None else context.sink.dp_rank
        if dp_rank is not None:
            name += f" of data parallel rank {dp_rank}"
        obstacle = self._layout.obstacle_to(theirs)
        mix_up = self._layout.mix_up_with(theirs)
        if mix_up is not None:
            logger.error(
                "kv-canary: KV for the decode server at %s may be wrong, and nothing checks its bytes: %s. %s",
                where,
                *mix_up,
            )
        content = (mix_up and mix_up.why) or self._layout.content_obstacle_to(theirs)
        if obstacle is not None:
            logger.warning(
                "kv-canary: KV is sent to the decode server at %s without records, because %s",
                where,
                obstacle,
            )
        draft = obstacle is None and self._layout.shares_draft_with(theirs)
        notice = Notice(
            name,
            obstacle is None,
            content is None,
            obstacle or content or "",
            draft,
            keeps_draft_content=draft and self._layout.keeps_draft_content_of(theirs),
            leaves_draft=obstacle is None and bool(self._layout.leaves_draft),
        )
        if obstacle is not None:
            return _Peer(registration, None, devices, notice, bool(theirs.heeds_damage))
        pointers = registration.dst_state_data_ptrs[-1]
        pointers = pointers if draft else pointers[: self._of_target]
        return _Peer(
            registration, self._bases(pointers), devices, notice, bool(theirs.heeds_damage)
        )

    def _bases(self, pointers: Sequence[int]) -> dict[PoolKind, tuple[tuple[int, int], ...]]:
        """`pointers`: of the peer's record buffers that ours go to, the target's, then the draft's."""
        pairs = list(zip(self._buffers, pointers, strict=False))
        return {
            kind: tuple((ours.data_ptr(), to) for (of, ours), to in pairs if of is kind)
            for kind in PoolKind
        }


def as_they_are(pages: Any) -> np.ndarray:
    """A copy of `pages`, from which both KV and records go.

    On a CPU, SGLang's array is a part of req_to_token. The prefix cache may re-point a page between the two: the last
    one of a chunk with EAGLE, whose key needs the token that follows.
    """
    return np.array(pages)


def at_once() -> int:
    """The `Arrive` of what has arrived, or of nothing."""
    return 0


def wrap_method(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let `owner.name(...)` be `around(original, ...)`. Raises CanaryStartupError if there is no such method."""
    original = getattr(owner, name, None)
    if not callable(original):
        raise startup_error(f"{type(owner).__name__} has no method {name}.", TRANSFERS)
    setattr(owner, name, functools.partial(around, original))
