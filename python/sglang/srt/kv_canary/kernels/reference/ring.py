"""Appending violation rows to the ring."""

from __future__ import annotations

import torch

from ...record import UNKNOWN, VIOLATION_COLUMNS, Column
from ...state import CanaryDeviceState


def append(state: CanaryDeviceState, reasons: torch.Tensor, **columns: torch.Tensor | int) -> None:
    """Append a row for each lane whose `reasons` (int64[n]) is not 0.

    `columns`: lower-case `Column` names with int64[n] or a number; what is not given is UNKNOWN.
    """
    bad = reasons != 0
    count = int(bad.sum())
    if count == 0:
        return
    rows = torch.full((count, VIOLATION_COLUMNS), UNKNOWN, dtype=torch.int64, device=reasons.device)
    rows[:, Column.REASONS] = reasons[bad]
    for name, value in columns.items():
        column = Column[name.upper()]
        rows[:, column] = value[bad] if isinstance(value, torch.Tensor) else value
    ring = state.violations
    sequence = int(ring.total) + torch.arange(count, device=rows.device)
    rows[:, Column.SEQUENCE] = sequence
    keep = slice(max(0, count - ring.capacity), None)
    ring.rows[sequence[keep] % ring.capacity] = rows[keep]
    ring.total.add_(count)
