"""Rows of the ring that were overwritten unread: which requests may have found them.

The rows are gone. The ring's memory of readers still says which request rows found something in which forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..record import Column
from ..state import READER_FORWARDS
from .flight_recorder import FlightRecorder
from .moot import are_moot

NOBODY = 0  # in the memory: found by no request, or by one whose row is not known

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
        waiting = {}
        for forward in recorder.on_record(first, last):
            if rows := _readers_in(forward, readers, recorder):
                waiting[forward] = rows
        return cls(findings, min(first, last), last, waiting, bool(waiting))

    def settle(
        self, left: np.ndarray, recorder: FlightRecorder, at_once: bool = False
    ) -> list[Reader]:
        """Of forwards that are settled, or of all: who may have read damage. `left`: rows that are not reported yet."""
        found: list[Reader] = []
        for forward in [f for f in self.waiting if at_once or recorder.is_settled(f)]:
            for row in self.waiting.pop(forward):
                if not _is_moot(forward, row, left, recorder):
                    self.is_moot = False
                    found += _requests(forward, row, recorder)
        return found


def _readers_in(forward: int, readers: np.ndarray, recorder: FlightRecorder) -> list[int]:
    """Rows that found something in `forward`. A later forward in the same place hides whether its rows did, too."""
    noted = readers[:, forward % READER_FORWARDS]
    step = recorder.step_of(forward)
    ran = {NOBODY} if step is None else {NOBODY, *step.requests}
    rows = np.flatnonzero(noted >= forward).tolist()
    return [row for row in rows if noted[row] == forward or row in ran]


def _is_moot(forward: int, row: int, left: np.ndarray, recorder: FlightRecorder) -> bool:
    """Whether what `row` found is. Of a living request, the findings that are left stand for the lost ones."""
    step = recorder.step_of(forward)
    if step is None or row == NOBODY:
        return False
    if row in step.moot_rows:
        return True
    left = left[(left[:, Column.READER_FORWARD] == forward) & (left[:, Column.READER_ROW] == row)]
    return bool(are_moot(left, recorder).all()) if len(left) else row in step.rewritten_rows


def _requests(forward: int, row: int, recorder: FlightRecorder) -> list[Reader]:
    """The request in `row`. Where the row is not known, it may be each one of the forward that was alive."""
    step = recorder.step_of(forward)
    if step is None or row != NOBODY:
        return [(forward, row)]
    return [(forward, each) for each in step.requests.keys() - step.moot_rows]
