"""NIXL writes the records of pages within SGLang's transfer of their KV, or as a transfer of its own.

NIXL's completion of one transfer says nothing about another. So a release says who waits for both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..transfer.layout import TransferLayout
from .record_sender import Arrive, RecordSender, Sides, wrap_method

__all__ = [
    "Passenger",
    "beside",
    "handles_of",
    "send_promised",
    "sender_over_nixl",
    "settling_in",
    "waiting_in",
]

_DEVICE = "VRAM"  # SGLang registers all states as memory of the device
Posted = Callable[[Any], Arrive]  # of the handle of a transfer


class _TransferFailed(RuntimeError):
    """SGLang fails the request, as it does when NIXL reports an error of a transfer of KV."""


def sender_over_nixl(kv_manager: Any, layout: TransferLayout, posted: Posted) -> RecordSender:
    """For `kv_manager`, a NixlKVManager of a prefill rank. Peers have the names of their agents."""
    errors = _errors()

    def post(peer: str, sides: Sides) -> Arrive:
        try:
            return posted(_post(kv_manager, peer, sides))
        except errors:
            raise
        except Exception as error:
            _raise_if_dropped(kv_manager.agent, peer, error)
            raise

    def devices_of(registration: Any) -> tuple[int, int]:
        return kv_manager.kv_args.gpu_id, registration.gpu_id

    return RecordSender(kv_manager, layout, post, errors, devices_of)


def waiting_in(agent: Any, siblings: Callable[[], Sequence[Any]] = tuple) -> Posted:
    """The sender waits, where no function of its release waits for all transfers of a chunk, or does so too late.

    `siblings`: transfers without which the chunk fails. After an error of one the sender waits no longer.
    """

    def posted(handle: Any) -> Arrive:
        def arrive() -> int:
            try:
                state = _settle(agent, handle, siblings)
            except _TransferFailed:  # of a sibling: SGLang gives this reason to the decode rank
                raise
            except Exception as error:  # the peer has been told that records come
                raise _TransferFailed("kv-canary: NIXL does not say what records did") from error
            if state == "ERR":
                raise _TransferFailed("kv-canary: NIXL reports an error of a transfer of records")
            return 0

        return arrive

    return posted


def send_promised(sender: RecordSender, peer: str, sides: Sides) -> None:
    """Send `sides`, of which `peer` has been told. After an error of ours SGLang fails the request, too."""
    if sender.send_sides(peer, sides) is None:
        raise _TransferFailed("kv-canary: records that were announced cannot be sent")


class Passenger:
    """Lets records travel in the transfers that SGLang posts: one transfer costs its host about a millisecond.

    SGLang describes the memory of a transfer here first, and then that at the peer.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._sides = threading.local()
        wrap_method(agent, "get_xfer_descs", self._describe)

    def carry(
        self,
        post_kv: Callable[[], Any],
        sides: Sides,
        otherwise: Callable[[], object],
    ) -> Any:
        """What `post_kv` returns, the handle of SGLang's own transfer. It takes `sides` along, see RecordSender.

        `otherwise` sends the records where `post_kv` describes no memory of the device.
        """
        here, there = sides
        waiting = self._sides.waiting = [there, here]
        try:
            handle = post_kv()
        finally:
            self._sides.waiting = []
        if not waiting:
            return handle
        return beside(lambda: handle, otherwise, settling_in(self._agent))

    def _describe(
        self, original: Callable[..., Any], blocks: Any, kind: Any = None, *args: Any, **more: Any
    ) -> Any:
        waiting = getattr(self._sides, "waiting", None)
        if waiting and kind == _DEVICE and isinstance(blocks, np.ndarray):
            blocks = np.concatenate([blocks, waiting.pop().astype(blocks.dtype, copy=False)])
        return original(blocks, kind, *args, **more)


def beside(
    post_kv: Callable[[], Any],
    post_records: Callable[[], object],
    give_up: Callable[[Any], object],
) -> Any:
    """What `post_kv` returns, the handle of SGLang's own transfer, when `post_records` has returned, too.

    After an error of the records the slots of the request go to others. Then `give_up` gets each handle of KV, which
    may still be under way.
    """
    handle = post_kv()
    try:
        post_records()
    except _errors():
        for each in handles_of(handle):
            give_up(each)
        raise
    return handle


def handles_of(posted: Any) -> Sequence[Any]:
    """Of what SGLang's functions return that post transfers: one handle, several, or None."""
    several = posted if isinstance(posted, (list, tuple)) else [posted]
    return [handle for handle in several if handle is not None]


def settling_in(agent: Any) -> Callable[[Any], None]:
    """Waits for the end of KV that is given up, where its release has no function that does."""

    def give_up(handle: Any) -> None:
        with suppress(Exception):  # SGLang fails the request in any case, and says why
            _settle(agent, handle)

    return give_up


def _errors() -> tuple[type[Exception], ...]:
    from sglang.srt.disaggregation.nixl import conn

    post = getattr(conn, "_NixlPostError", _TransferFailed)  # from 0.5.23 on
    return (_TransferFailed, post, *conn._NIXL_TRANSPORT_ERRORS)


def _raise_if_dropped(agent: Any, peer: str, error: Exception) -> None:
    """NIXL drops a peer that disconnects. SGLang's own transfers to it fail, too."""
    if not agent.check_remote_metadata(peer):
        raise _TransferFailed("kv-canary: NIXL has dropped the decode rank") from error


def _post(kv_manager: Any, peer: str, sides: Sides) -> Any:
    """Start to write `sides`, see RecordSender. Returns the transfer's handle."""
    agent = kv_manager.agent
    described = (agent.get_xfer_descs(side, _DEVICE) for side in sides)
    handle = agent.initialize_xfer("WRITE", *described, peer)
    why = "kv-canary: NIXL cannot begin a transfer of records"
    if (post := getattr(kv_manager, "_post_xfer", None)) is not None:
        post(
            handle, why
        )  # from 0.5.23 on: after its error the decode server keeps the slots for a while
    elif agent.transfer(handle) == "ERR":
        raise _TransferFailed(why)
    return handle


def _settle(agent: Any, handle: Any, siblings: Callable[[], Sequence[Any]] = tuple) -> str:
    """Returns when the transfer is over: DONE, or ERR. Raises _TransferFailed when one of `siblings` ends with ERR."""
    while (state := agent.check_xfer_state(handle)) not in ("DONE", "ERR"):
        if any(agent.check_xfer_state(each) == "ERR" for each in siblings()):
            raise _TransferFailed("kv-canary: another transfer of the chunk has failed")
        time.sleep(0)  # as SGLang waits for its own
    return state
