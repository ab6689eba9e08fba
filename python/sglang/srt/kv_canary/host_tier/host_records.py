"""Records beside the pages of a host pool, in host memory."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..host_code import HOST
from ..record import RECORD_WORDS, WORD_WRITER


@dataclass(frozen=True, slots=True)
class SlotRecords:
    """Records of some slots, on the host."""

    words: torch.Tensor  # int64[n, halves, RECORD_WORDS], as the device's TAIL records
    # int64[n]: the device slots of which the fingerprints were taken. Content mode `partial` samples by slot.
    sampled_as: torch.Tensor

    def __getitem__(self, index: slice | torch.Tensor) -> SlotRecords:
        return SlotRecords(self.words[index], self.sampled_as[index])

    def __len__(self) -> int:
        return self.sampled_as.shape[0]

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
    """One record per host slot and half. Zeros: there is none.

    Records and bytes that are copied from the device become visible together. The scheduler's thread and the threads of
    a storage backend may call every method. A sweep reads slots that another thread sets, so each record is read whole
    or not at all.
    """

    def __init__(self, num_slots: int, halves: int) -> None:
        self.num_slots = num_slots
        self._records = SlotRecords(
            torch.zeros((num_slots, halves, RECORD_WORDS), dtype=torch.int64),
            torch.zeros(num_slots, dtype=torch.int64),
        )
        self._words = self._records.words.numpy()
        self._sampled_as = self._records.sampled_as.numpy()
        # Beside the records, which are a cache line each: a load asks for each of its slots.
        self._has_record = np.zeros(num_slots, dtype=np.bool_)
        self._on_the_way: deque[_OnTheWay] = deque()
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        parts = (self._records.words, self._records.sampled_as, self._has_record)
        return sum(part.nbytes for part in parts)

    def put(self, slots: torch.Tensor, records: SlotRecords, event: Any | None = None) -> None:
        """Set the records of `slots` int64[n]. With `event`, once it has happened."""
        with self._lock:
            if event is not None:
                self._on_the_way.append(_OnTheWay(event, slots, records))
                return
            self._records.words[slots] = records.words
            self._records.sampled_as[slots] = records.sampled_as
            self._has_record[slots.numpy()] = records.present.numpy()

    def get(self, slots: torch.Tensor) -> SlotRecords:
        """A copy of the records of `slots` int64[n]. Waits for copies from the device."""
        self._settle(wait=True)
        with self._lock:
            return self._records[slots]

    def look_up(self, slots: np.ndarray, some: slice) -> tuple[int, tuple[np.ndarray, np.ndarray]]:
        """(how many of `slots` int64[n], from the first on, have records; words and sampled_as of `some` of them).

        Waits for copies from the device. Raises IndexError for slots beyond the pool. torch takes longer for few slots.
        """
        self._settle(wait=True)
        with self._lock:
            count = HOST.leading(self._has_record, slots)
            few = slots[some]
            return count, (self._words[few], self._sampled_as[few])

    def part(self, first: int, stop: int) -> SlotRecords:
        """A copy of the records of the slots [first, stop), as far as their copies have arrived."""
        self._settle(wait=False)
        with self._lock:
            part = self._records[slice(first, stop)]
            return SlotRecords(part.words.clone(), part.sampled_as.clone())

    def clear(self, slots: torch.Tensor | None = None) -> None:
        """`slots` int64[n] hold nothing any more; None: no slot does."""
        if slots is None:
            with self._lock:
                self._on_the_way.clear()
                self._records.words.zero_()
                self._has_record.fill(False)
            return
        self._settle(wait=True)
        with self._lock:
            self._records.words[slots] = 0
            self._has_record[slots.numpy()] = False

    def _settle(self, wait: bool) -> None:
        with self._lock:
            while self._on_the_way:
                first = self._on_the_way[0]
                if not first.event.query():
                    if not wait:
                        return
                    first.event.synchronize()
                self._on_the_way.popleft()
                self.put(first.slots, first.records)
