"""What later pipeline stages have found, in memory that they share with the first one. Nobody waits for anybody."""

from __future__ import annotations

import logging
import mmap
import pickle
import struct
from collections.abc import Iterator
from dataclasses import replace

from ...runner.damage_desk import Damage
from .rank_group import RankGroup
from .shared_memory import shared_memory

__all__ = ["Mailbox"]

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("=q")
BYTES = 256 * 1024  # of one stage, with the length in front


class Mailbox:
    """One place for each stage. A stage fills its own when it is empty, and the first stage empties all."""

    def __init__(self, memory: mmap.mmap, stages: int) -> None:
        self._memory, self._stages = memory, stages
        self._read: list[int] = []

    @classmethod
    def hang(cls, stages: RankGroup) -> Mailbox | None:
        """All stages must ask. None, on all of them: they are on several hosts."""
        memory = shared_memory(stages, BYTES * stages.size)
        return None if memory is None else cls(memory, stages.size)

    @property
    def has_any(self) -> bool:
        return any(self._length(stage) for stage in range(self._stages))

    def put(self, stage: int, found: Damage) -> Damage | None:
        """Returns the readers for which there was no room. They are for the next time.

        None: what this stage has put there before has not been read yet.
        """
        if self._length(stage):
            return None
        data, count = _packed(found, BYTES - _LENGTH.size)
        at = stage * BYTES
        self._memory[at + _LENGTH.size : at + _LENGTH.size + len(data)] = data
        self._memory[at : at + _LENGTH.size] = _LENGTH.pack(len(data))  # last: now it can be read
        return Damage(found.readers[count:])

    def read(self) -> Iterator[Damage]:
        self._read = [stage for stage in range(self._stages) if self._length(stage)]
        for stage in self._read:
            at = stage * BYTES + _LENGTH.size
            yield pickle.loads(self._memory[at : at + self._length(stage)])

    def clear(self) -> None:
        """What `read` has returned is dealt with."""
        for stage in self._read:
            self._memory[stage * BYTES : stage * BYTES + _LENGTH.size] = _LENGTH.pack(0)
        self._read = []

    def _length(self, stage: int) -> int:
        return _LENGTH.unpack_from(self._memory, stage * BYTES)[0]


def _packed(found: Damage, room: int) -> tuple[bytes, int]:
    """What fits of `found`, and how many of its readers are dealt with."""
    count = len(found.readers)
    data = pickle.dumps(found)
    if len(data) > room:
        # Without most of the slots, those end who have read damage. The cache is dropped for one of them.
        slots = sorted(found.slots, key=lambda slot: slot.changed)[:1]
        found = Damage(found.readers, tuple(slots), tainted=found.tainted[:1])
        data = pickle.dumps(found)
    while len(data) > room:
        count //= 2
        data = pickle.dumps(replace(found, readers=found.readers[:count]))
    if found.readers and not count:
        logger.error(
            "kv-canary action: a request that has read damage goes on, because its id is too long for the other "
            "pipeline stages: %d characters",
            len(found.readers[0].request_id),
        )
        count = 1
    return data, count
