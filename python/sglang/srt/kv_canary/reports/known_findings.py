"""Separates repeats from new findings in raw ring rows: every forward finds a damaged slot that stays again."""

from __future__ import annotations

import numpy as np

from ..record import Column
from .cause import Cause
from .flight_recorder import FlightRecorder
from .moot import readers_of

MAX_KNOWN = 16384  # findings remembered

_COLUMNS = (
    Column.TAG,
    Column.REASONS,
    Column.SLOT,
    Column.FULL_SLOT,
    Column.READER_ROW,
    Column.WRITER,
    Column.LAST_WRITER,
)


class KnownFindings:
    """finding -> its cause, for the last MAX_KNOWN findings. A forgotten finding counts as new again."""

    def __init__(self) -> None:
        self._causes: dict[bytes, Cause] = {}

    def __len__(self) -> int:
        return len(self._causes)

    def get(self, key: bytes) -> Cause | None:
        return self._causes.get(key)

    def add(self, key: bytes, cause: Cause) -> None:
        if len(self._causes) >= MAX_KNOWN:
            self._causes.pop(next(iter(self._causes)))
        self._causes[key] = cause


def finding_keys(rows: np.ndarray, recorder: FlightRecorder) -> list[bytes]:
    """A key for each of `rows` (int64[n, len(Column)]), equal for repeats of one finding by one request.

    A slot that was written or freed since then is another finding.
    """
    keys = np.empty((len(rows), len(_COLUMNS) + 1), dtype=np.int64)
    keys[:, 0] = _requests(rows, recorder)
    keys[:, 1:] = rows[:, _COLUMNS]
    return keys.view(f"V{keys.shape[1] * keys.itemsize}").ravel().tolist()


def _requests(rows: np.ndarray, recorder: FlightRecorder) -> np.ndarray:
    """A hash of each row's request id, looked up once per forward and request row."""
    pairs, each = readers_of(rows)
    return np.array([hash(recorder.request_id(*pair)) for pair in pairs], dtype=np.int64)[each]
