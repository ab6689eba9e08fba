"""Which findings are moot: the reader was dead, its row was being rewritten, or a predecessor could not be read.

A damaged pool gives a thousand rows a step. So Python looks at each forward and request once, and numpy at the rows.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ..buffer_group import PoolKind
from ..endpoint import CanaryLaunchTag
from ..plan.host_chain import first_links
from ..record import Column, Reason, chain_fold
from .flight_recorder import FlightRecorder

__all__ = ["are_moot", "are_settled", "readers_of"]

# The schedule stream unmaps a duplicate before it re-points the row, while forwards are queued. A reader in between
# sees 0. For a chunk of the row itself, slots may be unmapped, or mapped again for other requests, between the
# translation that its attention uses and HEAD.
_SEEN_OF_A_REWRITTEN_ROW = (Reason.SWA_EVICTED_IN_WINDOW, Reason.WRITE_LOCATION)

_COUNTED_ROWS = 1 << 16  # request rows below are counted in a table


def are_settled(rows: np.ndarray, recorder: FlightRecorder) -> np.ndarray:
    """bool[n]: whether it is known which requests of each row's forward were dead. `rows`: int64[n, len(Column)]."""
    of_rows = rows[:, Column.READER_FORWARD]
    if len(rows) and (of_rows == of_rows[0]).all():
        return np.full(len(rows), recorder.is_settled(int(of_rows[0])))
    forwards, each = np.unique(of_rows, return_inverse=True)
    settled = [recorder.is_settled(forward) for forward in forwards.tolist()]
    return np.array(settled, dtype=bool)[each.ravel()]


def are_moot(rows: np.ndarray, recorder: FlightRecorder) -> np.ndarray:
    """bool[n]: which of `rows`, int64[n, len(Column)], are no findings."""
    pairs, each = readers_of(rows)
    moot = np.array([recorder.is_moot(*pair) for pair in pairs], dtype=bool)[each]
    reasons, (evicted, elsewhere) = rows[:, Column.REASONS], _SEEN_OF_A_REWRITTEN_ROW
    if (seen := (reasons == evicted) | (reasons == elsewhere)).any():
        rewritten = np.array([recorder.was_rewritten(*pair) for pair in pairs], dtype=bool)[each]
        moot |= seen & rewritten
    return moot | _have_no_seed(rows)


def readers_of(rows: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """(distinct pairs of forward and request row, index of each row's pair, int64[n])."""
    forwards, readers = rows[:, Column.READER_FORWARD], rows[:, Column.READER_ROW]
    if _is_one_batch(forwards, readers):
        seen = np.flatnonzero(np.bincount(readers))
        number = np.empty(seen[-1] + 1, dtype=np.int64)
        number[seen] = np.arange(len(seen))
        return [(int(forwards[0]), reader) for reader in seen.tolist()], number[readers]
    _, first, each = np.unique((forwards << 21) ^ readers, return_index=True, return_inverse=True)
    pairs = zip(forwards[first].tolist(), readers[first].tolist(), strict=True)
    return list(pairs), each.ravel()


def _is_one_batch(forwards: np.ndarray, readers: np.ndarray) -> bool:
    """Whether counting is faster than sorting, as for nearly all steps."""
    if not len(forwards) or not (forwards == forwards[0]).all():
        return False
    return readers.min() >= 0 and readers.max() < _COUNTED_ROWS


def _have_no_seed(rows: np.ndarray) -> np.ndarray:
    """Whether a record or its predecessor was written when no predecessor could be read.

    SGLang unmaps an SWA slot before it re-points the row. A queued draft forward then finds no predecessor and starts
    from 0; target forwards start from the row memory. Such a record's words show it: its chain is one step from 0.
    Compressed slots fold chains of SWA slots.
    """
    # The first record of a chain steps from an anchor, which is 0 for most requests.
    possible = (rows[:, Column.REASONS] == Reason.CHAIN) & (rows[:, Column.PREV_SLOT] >= 0)
    found = np.zeros(len(rows), dtype=bool)
    tags = rows[:, Column.TAG]
    for tag in np.unique(tags[possible]).tolist():
        kind = _kind_of(tag)
        mine = np.flatnonzero(possible & (tags == tag))
        if kind is PoolKind.SWA:
            found[mine] = _are_first_links(rows[mine])
        elif kind.is_compressed:
            found[mine] = [_folds_a_chain_from_0(row, kind.stride) for row in rows[mine]]
    return found


@cache
def _kind_of(tag_id: int) -> PoolKind:
    return CanaryLaunchTag.from_id(tag_id).kind


def _are_first_links(rows: np.ndarray) -> np.ndarray:
    tokens, positions = rows[:, Column.STORED_TOKEN], rows[:, Column.STORED_POSITION]
    return rows[:, Column.STORED_CHAIN] == first_links(tokens, positions)


def _folds_a_chain_from_0(row: np.ndarray, stride: int) -> bool:
    tokens = int(row[Column.STORED_TOKEN]), int(row[Column.EXPECTED_TOKEN])
    return chain_fold(int(row[Column.STORED_CHAIN]), 0, stride) in tokens
