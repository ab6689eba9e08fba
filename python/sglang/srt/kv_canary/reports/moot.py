"""Which findings are moot: the reader was dead, its row was being rewritten, or a predecessor could not be read.

A damaged pool gives a thousand rows a step. So Python looks at each forward once, and numpy at the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from ..endpoint import NUM_TAGS, CanaryLaunchTag
from ..host_code import HOST
from ..plan.host_chain import first_links
from ..pool_kind import PoolKind
from ..record import Column, Reason, chain_fold
from .flight_recorder import FlightRecorder, StepRecord

__all__ = ["are_moot", "are_settled", "by_forward"]

# The schedule stream unmaps a duplicate before it re-points the row, while forwards are queued. A reader in between
# sees 0. For a chunk of the row itself, slots may be unmapped, or mapped again for other requests, between the
# translation that its attention uses and HEAD.
_SEEN_OF_A_REWRITTEN_ROW = (Reason.SWA_EVICTED_IN_WINDOW, Reason.WRITE_LOCATION)
# Where SWA slots are virtual, a slot without a page has a freed record. So has one whose record is still to come.
_SEEN_OF_VIRTUAL_SWA_SLOTS = (Reason.USE_AFTER_FREE, Reason.UNWRITTEN_SINCE_ALLOC)


def are_settled(rows: np.ndarray, recorder: FlightRecorder) -> np.ndarray:
    """bool[n]: whether it is known which requests of each row's forward were dead. `rows`: int64[n, len(Column)]."""
    settled = np.empty(len(rows), dtype=bool)
    for forward, mine in by_forward(rows):
        settled[mine] = recorder.is_settled(forward)
    return settled


def are_moot(rows: np.ndarray, recorder: FlightRecorder) -> np.ndarray:
    """bool[n]: which of `rows`, int64[n, len(Column)], are no findings."""
    moot = _have_no_seed(rows)
    for forward, mine in by_forward(rows):
        step = recorder.step_of(forward)
        if step is not None and (step.moot_rows or step.rewritten_rows):
            moot[mine] |= _are_moot_in(step, rows[mine], recorder.has_virtual_swa_slots)
    return moot


def _are_moot_in(step: StepRecord, rows: np.ndarray, virtual_swa: bool) -> np.ndarray:
    readers, reasons = rows[:, Column.READER_ROW], rows[:, Column.REASONS]
    seen = np.isin(reasons, _SEEN_OF_A_REWRITTEN_ROW)
    if virtual_swa:
        kinds = [_kind_of(tag) is PoolKind.SWA for tag in rows[:, Column.TAG].tolist()]
        seen |= np.isin(reasons, _SEEN_OF_VIRTUAL_SWA_SLOTS) & np.array(kinds, dtype=bool)
    rewritten = np.isin(readers, list(step.rewritten_rows))
    return np.isin(readers, list(step.moot_rows)) | (seen & rewritten)


def by_forward(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray | slice]]:
    """(forward, its places in `rows`) of each forward whose findings these are. Nearly always it is one."""
    forwards = rows[:, Column.READER_FORWARD]
    if len(rows) and HOST.are_equal(rows, Column.READER_FORWARD):
        yield int(forwards[0]), slice(None)
        return
    order = np.argsort(forwards, kind="stable")
    for mine in np.split(order, np.flatnonzero(np.diff(forwards[order])) + 1):
        if len(mine):
            yield int(forwards[mine[0]]), mine


def _have_no_seed(rows: np.ndarray) -> np.ndarray:
    """Whether a record or its predecessor was written when no predecessor could be read.

    SGLang unmaps an SWA slot before it re-points the row. A queued draft forward then finds no predecessor and starts
    from 0; target forwards start from the row memory. Such a record's words show it: its chain is one step from 0.
    Compressed slots fold chains of SWA slots.
    """
    # The first record of a chain steps from an anchor, which is 0 for most requests.
    tags = rows[:, Column.TAG]
    found = np.zeros(len(rows), dtype=bool)
    possible = _tags_without_seed()[tags]
    if not possible.any():
        return found
    possible &= rows[:, Column.REASONS] == Reason.CHAIN
    possible &= rows[:, Column.PREV_SLOT] >= 0
    if not possible.any():
        return found
    for tag in np.flatnonzero(np.bincount(tags[possible])).tolist():
        mine = np.flatnonzero(possible & (tags == tag))
        if (kind := _kind_of(tag)) is PoolKind.SWA:
            found[mine] = _are_first_links(rows[mine])
        else:
            found[mine] = [_folds_a_chain_from_0(row, kind.stride) for row in rows[mine]]
    return found


@cache
def _kind_of(tag_id: int) -> PoolKind:
    return CanaryLaunchTag.from_id(tag_id).kind


@cache
def _tags_without_seed() -> np.ndarray:
    """bool[NUM_TAGS]: whether SGLang unmaps slots of the tag's pool."""
    by_kind = [kind is PoolKind.SWA or kind.is_compressed for kind in PoolKind]
    return np.repeat(by_kind, NUM_TAGS // len(PoolKind))  # the tags of a kind follow each other


def _are_first_links(rows: np.ndarray) -> np.ndarray:
    tokens, positions = rows[:, Column.STORED_TOKEN], rows[:, Column.STORED_POSITION]
    return rows[:, Column.STORED_CHAIN] == first_links(tokens, positions)


def _folds_a_chain_from_0(row: np.ndarray, stride: int) -> bool:
    tokens = int(row[Column.STORED_TOKEN]), int(row[Column.EXPECTED_TOKEN])
    return chain_fold(int(row[Column.STORED_CHAIN]), 0, stride) in tokens
