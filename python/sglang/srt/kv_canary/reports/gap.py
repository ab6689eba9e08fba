"""Rows of the ring that were overwritten unread: which requests may have found them.

The rows are gone. The ring's memory of readers still says which request rows found something in which forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..record import Column
from ..state import READER_FORWARDS
from .flight_recorder import FlightRecorder, StepRecord
from .moot import are_moot

# In the ring's memory
NOBODY = 0  # found by a request whose row is not known
OUTSIDE = -1  # the last row: found by the sweep or by a free, after the forward

Reader = tuple[int, int]  # forward, request row


@dataclass(slots=True)
class Gap:
    """Rows that were overwritten between two copies of the ring."""

    findings: int  # rows
    first_forward: int
    last_forward: int
    # Forward -> request rows that may have found some, until it is known which of its requests were dead
    waiting: dict[int, list[int]] = field(default_factory=dict)
    is_moot: bool = False  # as far as is known: whether only dead requests have found them

    @classmethod
    def of(
        cls, findings: int, first: int, last: int, readers: np.ndarray, recorder: FlightRecorder
    ) -> Gap:
        """`readers`: the memory. The rows are of forwards from `first` to `last`, the oldest one that is left."""
        waiting, is_moot = {}, True
        # A double free, what a sweep finds and a draft's further steps have the number of the forward before
        for forward in recorder.on_record(first - 1, last):
            noted = readers[:, forward % READER_FORWARDS]
            if noted[OUTSIDE] >= forward:
                is_moot = False
            if rows := _readers_in(forward, noted[:OUTSIDE], recorder):
                waiting[forward] = rows
        return cls(findings, min(first, last), last, waiting, is_moot and bool(waiting))

    def settle(
        self, left: np.ndarray, recorder: FlightRecorder, at_once: bool = False
    ) -> list[Reader]:
        """Of forwards that are settled, or of all: who may have read damage. `left`: rows that are not reported yet."""
        settled = [f for f in self.waiting if at_once or recorder.is_settled(f)]
        if not settled:
            return []
        found: list[Reader] = []
        known, alive = _readers_of(left, recorder)
        for forward in settled:
            step = recorder.step_of(forward)
            rows = self.waiting.pop(forward)
            if step is not None:
                rows = [row for row in rows if not _is_moot(forward, row, step, known, alive)]
            if rows:
                self.is_moot = False
                if forward >= self.first_forward:  # whoever was in the one before has been told
                    found += _requests(forward, rows, step)
        return found


def _readers_in(forward: int, noted: np.ndarray, recorder: FlightRecorder) -> list[int]:
    """Rows that found something in `forward`. A later forward in the same place hides whether its rows did, too."""
    step = recorder.step_of(forward)
    ran = {NOBODY} if step is None else {NOBODY, *step.requests}
    rows = np.flatnonzero(noted >= forward).tolist()
    return [row for row in rows if noted[row] == forward or row in ran]


def _readers_of(left: np.ndarray, recorder: FlightRecorder) -> tuple[set[Reader], set[Reader]]:
    """Who has found the rows `left`, and those of them with one that is not moot. For all readers of a gap at once."""
    columns = (Column.READER_FORWARD, Column.READER_ROW)
    readers, moot = left[:, columns], are_moot(left, recorder)
    return _pairs(readers), _pairs(readers[~moot])


def _pairs(readers: np.ndarray) -> set[Reader]:
    return set(map(tuple, readers.tolist()))


def _is_moot(
    forward: int, row: int, step: StepRecord, known: set[Reader], alive: set[Reader]
) -> bool:
    """Whether what `row` found is. Of a living request, the findings that are left stand for the lost ones."""
    if row == NOBODY:
        return False
    if row in step.moot_rows:
        return True
    reader = forward, row
    return reader not in alive if reader in known else row in step.rewritten_rows


def _requests(forward: int, rows: list[int], step: StepRecord | None) -> list[Reader]:
    """The requests in `rows`. Where a row is not known, it may be each one of the forward that was alive."""
    if step is not None and NOBODY in rows:
        living = step.requests.keys() - step.moot_rows
        rows = [*living.union(rows) - {NOBODY}]
    return [(forward, row) for row in rows]
