"""Counting, and appending violation rows to the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...endpoint import CanaryLaunchTag
from ...pool_kind import Side
from ...record import UNKNOWN, VIOLATION_COLUMNS, Column, Reason
from ...state import (
    HEADER_WORDS,
    NUM_COUNTERS,
    READER_FORWARDS,
    CanaryDeviceState,
    TagCounter,
)
from .host import array

Values = np.ndarray | int


@dataclass(frozen=True, slots=True)
class Report:
    """Where the launch of one half counts and reports."""

    state: CanaryDeviceState
    tag: int  # launch tag id
    forward: int

    @property
    def is_sweep(self) -> bool:
        return CanaryLaunchTag.from_id(self.tag).side is Side.SWEEP

    def count(self, counter: TagCounter, amount: int) -> None:
        array(self.state.summary)[HEADER_WORDS + self.tag * NUM_COUNTERS + counter] += amount

    def append(self, reasons: np.ndarray, **columns: Values | Callable[[], Values]) -> None:
        """Append a row for each lane whose `reasons` (int64[n]) is not 0.

        `columns`: lower-case `Column` names with int64[n] or a number; what is not given is UNKNOWN, a writer 0.
        Functions are called only where there is a row to append, which is almost never.
        """
        bad = np.flatnonzero(reasons)
        count = bad.shape[0]
        if not count:
            return
        rows = np.full((count, VIOLATION_COLUMNS), UNKNOWN)
        rows[:, Column.TAG], rows[:, Column.READER_FORWARD] = self.tag, self.forward
        rows[:, Column.WRITER] = rows[:, Column.LAST_WRITER] = 0
        rows[:, Column.REASONS] = reasons[bad]
        for name, value in columns.items():
            column = Column[name.upper()]
            value = value() if callable(value) else value
            rows[:, column] = value[bad] if isinstance(value, np.ndarray) else value
        ring = self.state.violations
        sequence = int(ring.total) + np.arange(count)
        rows[:, Column.SEQUENCE] = sequence
        keep = slice(max(0, count - ring.capacity), None)
        array(ring.rows)[sequence[keep] % ring.capacity] = rows[keep]
        readers = rows[:, Column.READER_ROW]
        # What the sweep or a free finds is not what a forward has read
        is_outside = self.is_sweep | (rows[:, Column.REASONS] == Reason.DOUBLE_FREE)
        request_rows = len(ring.readers) - 1
        is_known = (readers > 0) & (readers < request_rows)
        readers = np.where(is_known, readers, np.where(is_outside, request_rows, 0))
        array(ring.readers)[readers, self.forward % READER_FORWARDS] = self.forward
        ring.total.add_(count)
