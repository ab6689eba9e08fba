"""Separates repeats from new findings in raw ring rows: every forward finds a damaged slot that stays again.

A damaged pool gives a thousand repeats a step, so Python looks at each cause once, and numpy at the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..endpoint import TAGS_PER_KIND
from ..record import MIX_INCREMENT, Column, mix64
from .cause import Cause
from .flight_recorder import FlightRecorder
from .moot import by_forward

MAX_KNOWN = 16384  # findings remembered
PLACES_PER_FINDING = 32  # of the index: few findings share one
LOOKUPS_PER_INDEX = 0.25  # of one finding, for each that is known: so much longer takes a new index

_COLUMNS = (
    Column.TAG,
    Column.REASONS,
    Column.SLOT,
    Column.FULL_SLOT,
    Column.READER_ROW,
    Column.WRITER,
    Column.LAST_WRITER,
)
# Odd numbers without a pattern.
_MULTIPLIERS = np.array(
    [mix64(i * MIX_INCREMENT) | 1 for i in range(len(_COLUMNS) + 1)], dtype=np.uint64
)


@dataclass(frozen=True, slots=True)
class Repeats:
    """Of one cause, in the rows of a step."""

    cause: Cause
    count: int
    last_row: int


@dataclass(frozen=True, slots=True)
class _Index:
    """Known findings in a table, in the place that a part of each key names. Of two in one place it has the last."""

    keys: np.ndarray  # uint64[n], n a power of two
    causes: tuple[Cause, ...]  # distinct ones
    cause_of: np.ndarray  # int32[n], index into `causes`; -1: nothing is in this place

    @classmethod
    def of(cls, known: dict[int, Cause]) -> _Index:
        keys = np.fromiter(known, dtype=np.uint64, count=len(known))
        causes = {cause.number: cause for cause in known.values()}
        place = {number: i for i, number in enumerate(causes)}
        size = 1 << (PLACES_PER_FINDING * len(known)).bit_length()
        index = cls(np.zeros(size, np.uint64), tuple(causes.values()), np.full(size, -1, np.int32))
        at = index._place_of(keys)
        index.keys[at] = keys
        index.cause_of[at] = [place[c.number] for c in known.values()]
        return index

    def look_up(self, keys: np.ndarray) -> np.ndarray:
        """int32[len(keys)]: index into `causes`; -1 for a finding that it does not have."""
        at = self._place_of(keys)
        return np.where(self.keys[at] == keys, self.cause_of[at], -1)

    def _place_of(self, keys: np.ndarray) -> np.ndarray:
        return (keys & np.uint64(len(self.keys) - 1)).view(np.int64)


class KnownFindings:
    """Keys of findings -> causes, for the last MAX_KNOWN findings. A forgotten finding counts as new again."""

    def __init__(self) -> None:
        self._causes: dict[int, Cause] = {}
        self._lookups = 0  # of single findings that `_index` lacks
        self._index = _Index.of({})
        self._is_behind = False  # whether findings came after `_index`

    def __len__(self) -> int:
        return len(self._causes)

    def add(self, key: int, cause: Cause) -> None:
        if len(self._causes) >= MAX_KNOWN:
            self._causes.pop(next(iter(self._causes)))
        self._causes[key] = cause
        self._is_behind = True

    def split(self, keys: np.ndarray) -> tuple[list[Repeats], list[int]]:
        """(repeats, one entry for each cause and way of look-up; rows of new findings) of uint64[n] `keys`."""
        if self._is_behind and self._lookups > LOOKUPS_PER_INDEX * len(self._causes):
            self._index, self._lookups, self._is_behind = _Index.of(self._causes), 0, False
        found = self._index.look_up(keys)
        repeats = list(self._by_cause(found))
        new = []
        for row in np.flatnonzero(found < 0).tolist():
            cause = self._causes.get(int(keys[row]))
            if cause is None:
                new.append(row)
            else:
                self._lookups += 1
                repeats.append(Repeats(cause, 1, row))
        return repeats, new

    def _by_cause(self, found: np.ndarray) -> Iterator[Repeats]:
        """`found` int32[n]: index of each row's cause; -1: none."""
        rows = np.flatnonzero(found >= 0)
        counts = np.bincount(found[rows], minlength=1)
        last = np.zeros(len(counts), dtype=np.int64)
        last[found[rows]] = rows  # the last of several assignments stays
        for index in np.flatnonzero(counts).tolist():
            yield Repeats(self._index.causes[index], int(counts[index]), int(last[index]))


class KnownSlots:
    """Slots that findings are about. Asked for a thousand rows at a time."""

    def __init__(self) -> None:
        self._known: dict[int, np.ndarray] = {}  # index of the pool kind -> bool by slot

    def note(self, row: np.ndarray) -> None:
        """`row` int64[len(Column)] of the ring is a finding about its slot."""
        kind, slot = int(row[Column.TAG]) // TAGS_PER_KIND, max(0, int(row[Column.SLOT]))
        known = self._known.get(kind)
        if known is None or slot >= len(known):
            grown = np.zeros(1 << (slot + 1).bit_length(), dtype=bool)
            grown[: 0 if known is None else len(known)] = False if known is None else known
            known = self._known[kind] = grown
        known[slot] = True

    def lacks(self, rows: np.ndarray) -> np.ndarray:
        """bool[n]: which of `rows` int64[n, len(Column)] are about other slots."""
        kinds, slots = rows[:, Column.TAG] // TAGS_PER_KIND, rows[:, Column.SLOT].clip(min=0)
        lacks = np.ones(len(rows), dtype=bool)
        for kind, known in self._known.items():
            mine = (kinds == kind) & (slots < len(known))
            lacks[mine] = ~known[slots[mine]]
        return lacks


def finding_keys(rows: np.ndarray, recorder: FlightRecorder) -> np.ndarray:
    """uint64[n] hashes of `rows` (int64[n, len(Column)]), equal for repeats of one finding by one request.

    A slot that was written or freed since then is another finding.
    """
    words = np.empty((len(_COLUMNS) + 1, len(rows)), dtype=np.int64)
    words[0] = _requests(rows, recorder)
    words[1:] = rows.T[_COLUMNS, :]
    # Fields of a word that differ in its high bits only would be lost in a sum of products.
    mixed = words.view(np.uint64)
    for shift, multipliers in ((32, _MULTIPLIERS), (29, _MULTIPLIERS[::-1])):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= multipliers[:, None]
    mixed ^= mixed >> np.uint64(32)
    return mixed.sum(axis=0, dtype=np.uint64)


def _requests(rows: np.ndarray, recorder: FlightRecorder) -> np.ndarray:
    """A hash of each row's request id, int64[n]; that of None where no request is known."""
    hashes = np.full(len(rows), hash(None))
    for forward, mine in by_forward(rows):
        step = recorder.step_of(forward)
        if step is not None and step.requests:
            hashes[mine] = _hashes_of(step.requests, rows[mine, Column.READER_ROW])
    return hashes


def _hashes_of(requests: Mapping[int, str], readers: np.ndarray) -> np.ndarray:
    """Of the ids of request rows `readers`, int64[n]."""
    count = len(requests)
    known = np.fromiter(requests, dtype=np.int64, count=count)
    table = np.full(known.max() + 2, hash(None))  # the last entry is for all other rows
    table[known] = np.fromiter(map(hash, requests.values()), dtype=np.int64, count=count)
    other = (readers < 0) | (readers >= len(table))
    return table[np.where(other, -1, readers)]
