"""Separates repeats from new findings in raw ring rows: every forward finds a damaged slot that stays again.

A damaged pool gives a thousand repeats a step, so Python looks at each cause once, and numpy at the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..endpoint import TAGS_PER_KIND
from ..host_code import HOST
from ..record import MIX_INCREMENT, Column, mix64
from .cause import Cause
from .flight_recorder import FlightRecorder
from .moot import by_forward

MAX_KNOWN = 16384  # findings remembered
MAX_READERS = 16384  # requests remembered; then all count as new once
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
_MULTIPLIERS = tuple(mix64(i * MIX_INCREMENT) | 1 for i in range(len(_COLUMNS) + 1))


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

    def look_up(self, keys: np.ndarray) -> tuple[list[Repeats], list[int]]:
        """(repeats, one entry for each cause; rows of `keys` uint64[n] that it does not have)."""
        found, missing = HOST.look_up(keys, self.keys, self.cause_of, len(self.causes))
        return [Repeats(self.causes[i], count, last) for i, count, last in found], missing

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
        repeats, missing = self._index.look_up(keys)
        new = []
        for row in missing:
            cause = self._causes.get(int(keys[row]))
            if cause is None:
                new.append(row)
            else:
                self._lookups += 1
                repeats.append(Repeats(cause, 1, row))
        return repeats, new


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
        flags = HOST.lacking(rows, Column.TAG, Column.SLOT, TAGS_PER_KIND, self._known)
        return np.frombuffer(flags, dtype=bool)


class KnownReaders:
    """Requests of which all findings of a step were looked at. Asked for a thousand rows at a time."""

    def __init__(self) -> None:
        self._known: set[tuple[int, str]] = set()  # row, request id
        # Requests of a step, all of them known. Steps share it while their batch stays
        self._all_known: Sequence[tuple[int | None, str]] | None = None

    def new_in(self, rows: np.ndarray, recorder: FlightRecorder) -> np.ndarray:
        """bool[n]: which of `rows` int64[n, len(Column)] other requests have read. Now they are known, too."""
        new = np.zeros(len(rows), dtype=bool)
        for forward, mine in by_forward(rows):
            step = recorder.step_of(forward)
            if step is None or step.named is self._all_known:
                continue
            # Nearly always all are known, and this takes a tenth of a search for those that are not.
            if step.requests.items() <= self._known:
                self._all_known = step.named
                continue
            unknown = [each for each in step.requests.items() if each not in self._known]
            readers = rows[mine, Column.READER_ROW]
            new[mine] = np.isin(readers, [row for row, _ in unknown])
            seen = set(readers[new[mine]].tolist())
            self._note(reader for reader in unknown if reader[0] in seen)
        return new

    def _note(self, readers: Iterable[tuple[int, str]]) -> None:
        if len(self._known) >= MAX_READERS:
            self._known.clear()
            self._all_known = None
        self._known.update(readers)


def finding_keys(rows: np.ndarray, recorder: FlightRecorder) -> np.ndarray:
    """uint64[n] hashes of `rows` (int64[n, len(Column)]), equal for repeats of one finding by one request.

    A slot that was written or freed since then is another finding.
    """
    keys = np.empty(len(rows), dtype=np.uint64)
    for forward, mine in by_forward(rows):
        step = recorder.step_of(forward)
        names = {} if step is None else step.requests
        found = HOST.keys_of_rows(rows[mine], _COLUMNS, _MULTIPLIERS, Column.READER_ROW, names)
        keys[mine] = np.frombuffer(found, dtype=np.uint64)
    return keys
