"""Counting, and appending violation rows to the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...record import UNKNOWN, VIOLATION_COLUMNS, Column
from ...state import CanaryDeviceState, TagCounter

Values = torch.Tensor | int


@dataclass(frozen=True, slots=True)
class Report:
    """Where the launch of one half counts and reports."""

    state: CanaryDeviceState
    tag: int  # launch tag id
    forward: int

    def count(self, counter: TagCounter, amount: torch.Tensor | int) -> None:
        self.state.counters[self.tag, counter].add_(amount)

    def append(self, reasons: torch.Tensor, **columns: Values | Callable[[], Values]) -> None:
        """Append a row for each lane whose `reasons` (int64[n]) is not 0.

        `columns`: lower-case `Column` names with int64[n] or a number; what is not given is UNKNOWN, a writer 0.
        Functions are called only where there is a row to append, which is almost never.
        """
        bad = reasons != 0
        count = int(bad.sum())
        if count == 0:
            return
        shape = (count, VIOLATION_COLUMNS)
        rows = torch.full(shape, UNKNOWN, dtype=torch.int64, device=reasons.device)
        rows[:, Column.TAG], rows[:, Column.READER_FORWARD] = self.tag, self.forward
        rows[:, Column.WRITER] = rows[:, Column.LAST_WRITER] = 0
        rows[:, Column.REASONS] = reasons[bad]
        for name, value in columns.items():
            column = Column[name.upper()]
            value = value() if callable(value) else value
            rows[:, column] = value[bad] if isinstance(value, torch.Tensor) else value
        ring = self.state.violations
        sequence = int(ring.total) + torch.arange(count, device=rows.device)
        rows[:, Column.SEQUENCE] = sequence
        keep = slice(max(0, count - ring.capacity), None)
        ring.rows[sequence[keep] % ring.capacity] = rows[keep]
        ring.total.add_(count)
