"""Where KV came from that a request has not computed on this server."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ..pool_kind import PoolKind

__all__ = ["Origin"]

_WITH_THE_LAST = {PoolKind.SWA: "the window is", PoolKind.INDEXER: "index keys are"}


@dataclass(frozen=True, slots=True)
class Origin:
    """`text` names the sender and what it calls the request. `chunks`: first position of each chunk that it sent."""

    text: str
    chunks: tuple[int, ...] = ()

    def at(self, position: int | None, kind: PoolKind = PoolKind.FULL) -> str:
        """What is known about the token at `position`, in the pool `kind`."""
        number, count = self.chunk(position, kind), len(self.chunks)
        if number is None:
            return self.text
        if kind in _WITH_THE_LAST:
            what = f"{_WITH_THE_LAST[kind]} sent with the last one"
        else:
            until = f"to {self.chunks[number] - 1}" if number < count else "on"
            what = f"positions from {self.chunks[number - 1]} {until}"
        return f"{self.text}, chunk {number} of {count} ({what})"

    def chunk(self, position: int | None, kind: PoolKind = PoolKind.FULL) -> int | None:
        """Number of the chunk, from 1, that brought the token at `position`. None: none did, or it is not known."""
        number = 0 if position is None else bisect_right(self.chunks, position)
        if kind in _WITH_THE_LAST and (number or position is None):
            number = len(self.chunks)
        return number or None
