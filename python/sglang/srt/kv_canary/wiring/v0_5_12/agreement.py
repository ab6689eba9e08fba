"""Which damage is acted on, and in which step: the same on all tensor-parallel ranks.

SGLang's first rank reads the requests of a step and broadcasts them to the others. Damage goes with them. What another
rank has found reaches the first one through a socket. Without damage this costs one look at the socket.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...runner.damage_desk import Damage

__all__ = ["AgreedDamage", "Agreement", "Alone", "Together"]


@dataclass(frozen=True, slots=True)
class AgreedDamage:
    """Among the requests of a step."""

    wire: str


class Alone:
    """One rank decides for itself."""

    def __init__(self) -> None:
        self._found: list[Damage] = []

    def publish(self, damage: Damage) -> None:
        """This rank has found `damage`."""
        self._found.append(damage)

    def before_requests(self) -> None:
        """The scheduler is about to read the requests of a step."""

    def agreed(self, requests: list[Any] | None) -> list[Damage]:
        """What all ranks act on in this step. Removes it from `requests`, the step's."""
        found, self._found = self._found, []
        return found


class Together:
    """One of several ranks of one host."""

    def __init__(self, scheduler: Any) -> None:
        import zmq

        self._zmq, self._is_first = zmq, scheduler.tp_rank == 0
        self._socket = zmq.Context.instance().socket(zmq.PULL if self._is_first else zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = self._agree_on_address(scheduler)
        if self._is_first:
            self._requests = _RequestsWithDamage(scheduler.recv_from_tokenizer)
            scheduler.recv_from_tokenizer = self._requests
        else:
            self._socket.connect(address)

    def _agree_on_address(self, scheduler: Any) -> str:
        from sglang.srt.utils import broadcast_pyobj

        address = []
        if self._is_first:
            folder = tempfile.mkdtemp(prefix="kvc_")
            address = [f"ipc://{os.path.join(folder, 'damage')}"]
            self._socket.bind(address[0])
        group = scheduler.tp_group
        return broadcast_pyobj(address, group.rank, scheduler.tp_cpu_group, src=group.ranks[0])[0]

    def publish(self, damage: Damage) -> None:
        if self._is_first:
            self._requests.waiting.append(AgreedDamage(damage.to_wire()))
        else:
            self._socket.send_string(damage.to_wire(), self._zmq.NOBLOCK)

    def before_requests(self) -> None:
        if not self._is_first:
            return
        while self._socket.get(self._zmq.EVENTS) & self._zmq.POLLIN:
            self._requests.waiting.append(AgreedDamage(self._socket.recv_string()))

    def agreed(self, requests: list[Any] | None) -> list[Damage]:
        found = [r for r in requests or () if isinstance(r, AgreedDamage)]
        if found:
            requests[:] = [r for r in requests if not isinstance(r, AgreedDamage)]
        return [Damage.from_wire(each.wire) for each in found]


Agreement = Alone | Together


class _RequestsWithDamage:
    """The socket from which the first rank reads requests. Damage comes first."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.waiting: deque[AgreedDamage] = deque()

    def recv_pyobj(self, *args: Any, **kwargs: Any) -> Any:
        if self.waiting:
            return self.waiting.popleft()
        return self._socket.recv_pyobj(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def why_not_agreed(server_args: Any) -> str | None:
    """Why the ranks of this server cannot agree. None: they can."""
    reasons: Sequence[tuple[bool, str]] = (
        (server_args.pp_size > 1, "pipeline stages act in different steps"),
        (server_args.nnodes > 1 and server_args.tp_size > 1, "its ranks are on several hosts"),
        (
            server_args.enable_dp_attention and server_args.tp_size > server_args.dp_size,
            "ranks of data-parallel attention share requests in groups",
        ),
    )
    return next((why for applies, why in reasons if applies), None)
