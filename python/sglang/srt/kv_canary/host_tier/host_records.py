"""Records beside the pages of a host pool, in host memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..host_code import HOST
from ..record import RECORD_WORDS, WORD_WRITER


@dataclass(frozen=True, slots=True)
class SlotRecords:
    """Records of some slots, on the host."""

    words: torch.Tensor  # int64[n, parts, RECORD_WORDS], as the device's TAIL records

    def __getitem__(self, index: slice | torch.Tensor) -> SlotRecords:
        return SlotRecords(self.words[index])

    def __len__(self) -> int:
        return self.words.shape[0]

    @property
    def present(self) -> torch.Tensor:
        """bool[n]: whether there is a record."""
        return self.words[:, 0, WORD_WRITER] != 0


@dataclass(frozen=True, slots=True)
class _OnTheWay:
    event: Any  # of the stream that copies records and bytes from the device
    slots: torch.Tensor
    records: SlotRecords


class HostRecords:
    """One record per host slot and part (a half of a group). Zeros: there is none.

    Records and bytes that are copied from the device become visible together. The scheduler's thread and the threads of
    a storage backend may call every method. A sweep reads slots that another thread sets, so each record is read whole
    or not at all.

    What was put or cleared last holds, in whichever order copies arrive. `put`, `part` and `clear` wait for no copy.
    `get` and `look_up` wait for copies to the slots that they read, and block no other thread.
    """

    def __init__(self, num_slots: int, parts: int) -> None:
        self.num_slots = num_slots
        self._records = SlotRecords(
            torch.zeros((num_slots, parts, RECORD_WORDS), dtype=torch.int64)
        )
        self._words = self._records.words.numpy()
        # Beside the records, which are a cache line each: a load asks for each of its slots.
        self._has_record = np.zeros(num_slots, dtype=np.bool_)
        self._on_the_way: dict[int, _OnTheWay] = {}  # by number, from 1 on
        # The copy that will fill each slot; 0: none. So a copy fills no slot that was put or cleared after it.
        self._awaits = np.zeros(num_slots, dtype=np.int64)
        self._copies = 0  # since the start
        self._lock = threading.Lock()  # never held while a copy is awaited

    @property
    def nbytes(self) -> int:
        parts = (self._records.words, self._has_record, self._awaits)
        return sum(part.nbytes for part in parts)

    def put(self, slots: torch.Tensor, records: SlotRecords, event: Any | None = None) -> None:
        """Set the records of `slots` int64[n]. With `event`, once it has happened."""
        with self._lock:
            if event is None:
                self._set(slots, records)
                return
            self._fill_in_order()
            self._copies += 1
            self._on_the_way[self._copies] = _OnTheWay(event, slots, records)
            self._awaits[slots.numpy()] = self._copies

    def get(self, slots: torch.Tensor) -> SlotRecords:
        """A copy of the records of `slots` int64[n]. Waits for copies from the device to these slots."""
        with self._filled(slots.numpy()):
            return self._records[slots]

    def look_up(self, slots: np.ndarray, some: slice) -> tuple[int, np.ndarray]:
        """(how many of `slots` int64[n], from the first on, have records; words of `some` of them).

        Waits as `get` does. Raises IndexError for slots beyond the pool. torch takes longer for few slots.
        """
        with self._filled(slots):
            count = HOST.leading(self._has_record, slots)
            return count, self._words[slots[some]]

    def part(self, first: int, stop: int) -> SlotRecords:
        """A copy of the records of the slots [first, stop), as far as their copies have arrived."""
        with self._lock:
            self._fill(slice(first, stop))
            part = self._records[slice(first, stop)]
            return SlotRecords(part.words.clone())

    def clear(self, slots: torch.Tensor | None = None) -> None:
        """`slots` int64[n] hold nothing any more, also once copies to them arrive; None: no slot does."""
        with self._lock:
            if slots is None:
                self._on_the_way.clear()
                self._awaits.fill(0)
                self._records.words.zero_()
                self._has_record.fill(False)
                return
            self._awaits[slots.numpy()] = 0
            self._records.words[slots] = 0
            self._has_record[slots.numpy()] = False

    @contextmanager
    def _filled(self, slots: np.ndarray) -> Iterator[None]:
        """Holds the lock, once no copy to `slots` is under way."""
        while True:
            with self._lock:
                events = self._fill(slots)
                if not events:
                    yield
                    return
            for event in events:
                event.synchronize()

    # With the lock held

    def _set(self, slots: torch.Tensor, records: SlotRecords) -> None:
        numbers = slots.numpy()
        self._awaits[numbers] = 0
        self._records.words[slots] = records.words
        self._has_record[numbers] = records.present.numpy()

    def _fill(self, where: np.ndarray | slice) -> list[Any]:
        """Take over the copies to the slots `where` that have arrived. Returns the events of the others."""
        if not self._on_the_way:
            return []
        awaited = self._awaits[where]
        numbers = np.unique(awaited[awaited != 0]).tolist()
        return [self._on_the_way[each].event for each in numbers if not self._take_over(each)]

    def _fill_in_order(self) -> None:
        """Take over what has arrived, so that copies to slots that nobody reads do not pile up."""
        for number in list(self._on_the_way):
            if not self._take_over(number):
                return

    def _take_over(self, number: int) -> bool:
        """Set the records of this copy where slots still await it. False: it has not arrived."""
        copy = self._on_the_way[number]
        if not copy.event.query():
            return False
        del self._on_the_way[number]
        still = self._awaits[copy.slots.numpy()] == number
        if still.all():
            self._set(copy.slots, copy.records)
        else:
            which = torch.from_numpy(still)
            self._set(copy.slots[which], copy.records[which])
        return True
