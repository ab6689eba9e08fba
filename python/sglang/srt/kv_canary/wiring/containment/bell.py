"""A bell that all tensor-parallel ranks hear in the same step, without a collective of its own.

Any rank rings it, in a byte of memory that the ranks of a host share. Rank 0 looks at the bytes when it sends the
step's new requests to the other ranks, and sends a mark along. No rank waits for another one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .rank_group import RankGroup
from .shared_memory import shared_memory

__all__ = ["Bell", "BellMark", "memory_size"]

_RUNG = b"\x01"
_NUMBER = struct.Struct("=q")


class BellMark:
    """Among the requests that rank 0 sends: all ranks hear the bell in this step."""


class Bell:
    """One per scheduler process. `memory` has `memory_size(ranks.size)` bytes: one of each rank, then its number."""

    def __init__(self, ranks: RankGroup, memory: mmap.mmap) -> None:
        self._memory, self._rank, self._size = memory, ranks.rank, ranks.size
        self._known = 0
        self._receiving = False
        self._heard = False

    @classmethod
    def hang(cls, ranks: RankGroup) -> Bell | None:
        """All ranks must ask. None, on all of them: they share no memory."""
        memory = shared_memory(ranks, memory_size(ranks.size))
        return None if memory is None else cls(ranks, memory)

    def ring(self) -> None:
        """All ranks hear it in one of the next steps, also if several of them ring."""
        self._memory[self._rank] = 1

    def heard(self) -> bool:
        """Whether the bell was sent with the requests that have just arrived. From now on it can be rung again."""
        heard, self._heard = self._heard, False
        if heard:
            self._memory[self._rank] = 0
        return heard

    def say_known(self, number: int) -> None:
        """What this rank has found about requests up to `number` is known, and has rung the bell."""
        if number > self._known:
            self._known = number
            self._memory[self._place(self._rank)] = _NUMBER.pack(number)

    def known_everywhere(self) -> int:
        """The number up to which all ranks have said so."""
        places = (self._place(rank) for rank in range(self._size))
        return min(_NUMBER.unpack(self._memory[place])[0] for place in places)

    def _place(self, rank: int) -> slice:
        at = memory_size(rank, self._size)
        return slice(at, at + _NUMBER.size)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While the scheduler receives the requests of a step."""
        self._receiving = True
        try:
            yield
        finally:
            self._receiving = False

    def around_broadcast(
        self, original: Callable[..., list[Any]], data: list[Any] | None, *a: Any, **k: Any
    ) -> list[Any]:
        """Around SGLang's broadcast of the requests from rank 0."""
        if not self._receiving:
            return original(data, *a, **k)
        if self._rank == 0 and self._memory.find(_RUNG, 0, self._size) >= 0:
            data = [*data, BellMark()]
        received = original(data, *a, **k)
        if received and isinstance(received[-1], BellMark):
            self._heard = True
            return received[:-1]
        return received


def memory_size(numbers: int, ranks: int | None = None) -> int:
    """Bytes of `ranks` bells, as many as `numbers` if None, and of `numbers` numbers behind them."""
    bells = numbers if ranks is None else ranks
    return -(-bells // _NUMBER.size) * _NUMBER.size + numbers * _NUMBER.size
