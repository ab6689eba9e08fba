"""KV that arrives in a runner's slots: launches its check, and says when it is known what the check has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..launch.arrivals import ArrivalLauncher
from ..plan.arrival import Arrival
from ..record import Column, Mode
from ..reports.gap import NOBODY

OUTCOMES = ("checked", "taken_over", "aborted")


@dataclass(slots=True)
class ArrivalDesk:
    """Belongs to one manager. Used from the scheduler's thread.

    `attempt(function, *args)` contains errors and returns whether there was none. `note_launch(mode)` numbers a
    forward and returns its number.
    """

    launcher: ArrivalLauncher
    attempt: Callable[..., bool]
    note_launch: Callable[[str], int]
    outcomes: Counter[str] = field(default_factory=Counter)  # requests, by one of OUTCOMES
    _damaged: dict[int, set[int]] = field(default_factory=dict)  # forward -> rows, of awaited ones
    # Of the same forwards, the first position that has arrived. What lies before it was in the prefix cache.
    _firsts: dict[int, int] = field(default_factory=dict)
    _rows: dict[int, int] = field(default_factory=dict)  # of the same forwards, the awaited row
    # Of them, those that may have found more than is known
    _lost: set[int] = field(default_factory=set)
    _forgotten: set[int] = field(default_factory=set)  # forwards, until they are known
    _known: int = 0  # everything that forwards up to this one have found has been handed over

    def warm_up(self) -> None:
        """Compile what arrivals launch, while nothing is armed: a token in the padding row and slot.

        Records that come without the content of these bytes launch all that others do, and take the bytes over.
        """
        padding = Arrival(row=0, first=0, tokens=(0,), anchor=0, keeps_content=False)
        for arrival in (padding, replace(padding, has_records=False)):
            for launch, part in self.launcher.launches([arrival]):
                self.note_launch("WARM_UP")
                launch(part)

    def note(self, arrivals: Sequence[Arrival]) -> int:
        """Check `arrivals` on the current stream, or take over what has no records. Number of the last forward."""
        forward = 0
        for launch, part in self.launcher.launches(arrivals):
            forward = self.note_launch(Mode.ARRIVAL.name)
            if not self.attempt(launch, part):
                return 0
            self.outcomes["checked" if part[0].has_records else "taken_over"] += len(part)
        return forward

    def await_findings(self, forward: int, first: int, row: int) -> None:
        """Keep what `forward`, which checks `row`, finds from position `first` on, for `verdict`."""
        self._damaged.setdefault(forward, set())
        self._firsts[forward] = first
        self._rows[forward] = row

    def awaits(self, forward: int) -> bool:
        """Whether somebody asks for the verdict on `forward`."""
        return forward in self._rows

    def are_awaited(self, rows: np.ndarray) -> np.ndarray:
        """bool[n]: which `rows` int64[n, len(Column)] count for a verdict that somebody asks for."""
        mine = np.zeros(len(rows), dtype=bool)
        expected = rows[:, Column.EXPECTED_POSITION]
        # Of changed bytes, the record is right. A position that is not known is below 0.
        position = np.where(expected < 0, rows[:, Column.STORED_POSITION], expected)
        for forward, first in self._firsts.items():
            is_cached = (position >= 0) & (position < first)
            mine |= (rows[:, Column.READER_FORWARD] == forward) & ~is_cached
        return mine

    def note_findings(self, rows: np.ndarray) -> None:
        """`rows` int64[n, len(Column)] of the ring are reported."""
        if not self._damaged or not len(rows):
            return
        rows = rows[self.are_awaited(rows)]
        readers = np.unique(rows[:, (Column.READER_FORWARD, Column.READER_ROW)], axis=0)
        for forward, row in readers.tolist():
            self._damaged[forward].add(row)

    def note_lost(self, lost: Sequence[tuple[int, int]]) -> None:
        """(Forward, row): what they have found may have been overwritten unread, so it is not known to be right."""
        self._lost.update(f for f, row in lost if self.awaits(f) and row in (self._rows[f], NOBODY))

    def has_lost(self, forward: int) -> bool:
        """Whether the awaited `forward` may have found more than is known."""
        return forward in self._lost

    def note_known(self, forward: int) -> None:
        """Everything that forwards up to `forward` have found has been handed to `note_findings`."""
        self._known = max(self._known, forward)
        self._drop_forgotten()

    def verdict(self, forward: int) -> frozenset[int] | None:
        """Rows in which the awaited `forward` found damage, or may have found some. None: not known yet."""
        if forward > self._known:
            return None
        found = frozenset(self._damaged.get(forward, ()))
        return found | {self._rows[forward]} if forward in self._lost else found

    def forget(self, forward: int) -> None:
        """Nobody asks for the verdict on `forward` any more. What it still finds has no other owner."""
        self._forgotten.add(forward)
        self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        for forward in [each for each in self._forgotten if each <= self._known]:
            self._forgotten.discard(forward)
            self._damaged.pop(forward, None)
            self._firsts.pop(forward, None)
            self._rows.pop(forward, None)
            self._lost.discard(forward)

    def copy_out(self, row: int, length: int) -> list[torch.Tensor]:
        """The records of the row's first tokens, in host memory. Waits for the device, as the copy of their KV does."""
        return self.launcher.copy_out(row, length)

    def copy_in(self, row: int, length: int, copies: Iterable[torch.Tensor]) -> bool:
        """Put back what `copy_out` returned, before `note`."""
        return self.attempt(self.launcher.copy_in, row, length, copies)
