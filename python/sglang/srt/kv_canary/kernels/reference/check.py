"""The check of one slot, shared by the per-forward spans and the sweep's flat list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...record import Reason
from ...state import Header
from . import hashing
from .host import array
from .ring import Report


@dataclass(frozen=True, slots=True)
class Lanes:
    """Slots to check, int64[n] each."""

    slots: np.ndarray
    full_slots: np.ndarray
    prev_slots: np.ndarray  # or PREV_ANCHOR / PREV_UNREACHABLE
    positions: np.ndarray
    anchors: np.ndarray
    expected_tokens: np.ndarray  # UNKNOWN where the token is not known
    rows: np.ndarray  # reader's request row
    reasons: np.ndarray  # what is wrong before the record is read; such lanes are not read


def translate(group: CanaryBufferGroup, full_slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(slot in the group's space, reasons) of full slots int64[n]; lanes with reasons have slot 0."""
    lut = group.swa_index_lut
    limit = group.num_slots * group.stride if lut is None else lut.shape[0]
    bad = (full_slots < 0) | (full_slots >= limit)
    below = full_slots < group.stride  # slot 0 of the group's own space
    reasons = np.where(bad, int(Reason.SLOT_OUT_OF_RANGE), below * int(Reason.UNMAPPED_SLOT))
    safe = full_slots * ~(bad | below)
    if lut is None:
        return safe // group.stride, reasons
    slots = array(lut)[safe].astype(np.int64)
    outside = (slots < 0) | (slots >= group.num_slots)
    mapped = np.where(
        outside, int(Reason.SLOT_OUT_OF_RANGE), (slots == 0) * int(Reason.SWA_EVICTED_IN_WINDOW)
    )
    reasons = np.where(reasons == 0, mapped, reasons)
    return slots * (reasons == 0), reasons


def state_reasons(states: np.ndarray, unfills: bool) -> np.ndarray:
    """Reason bits of record states other than live. With `unfills`, an unfilled record has none."""
    reasons = [int(Reason.BAD_STATE)] * (record.DAMAGED + 1)
    if unfills:
        reasons[record.State.UNFILLED] = 0
    reasons[record.State.NEVER_WRITTEN] = int(Reason.NEVER_WRITTEN)
    reasons[record.State.FREED] = int(Reason.USE_AFTER_FREE)
    reasons[record.State.ALLOCATED] = int(Reason.UNWRITTEN_SINCE_ALLOC)
    return np.array(reasons)[states]


def check_lanes(
    lanes: Lanes,
    group: CanaryBufferGroup,
    records: np.ndarray,
    report: Report,
    reports_stale_weights: bool = False,
) -> None:
    """Check `lanes` against `records` int64[num_slots, 4] of `group` and append what fails to the ring.

    Without a chain source, chains step from `records` themselves and no record is unfilled. Lanes of a strided group
    expect no token. The ring gets folds of chains (`record.chain_fold`) as their tokens. `reports_stale_weights`
    reports the first slot of each run that earlier weights wrote.
    """
    if not lanes.slots.size:
        return
    chain_source, stride = group.chain_source, group.stride
    readable = lanes.reasons == 0
    words = records[lanes.slots * readable]
    identity, chain = words[:, record.WORD_IDENTITY], words[:, record.WORD_CHAIN]
    writer = words[:, record.WORD_WRITER]
    position, token = hashing.stored_position(identity), hashing.stored_token(identity)
    states = hashing.state_of(writer)
    not_live = state_reasons(states, unfills=chain_source is not None)
    chained_to = records if chain_source is None else array(chain_source)
    previous, chained = _previous_chain(lanes, chained_to)
    expected_token = lanes.expected_tokens
    expected_chain = np.full_like(chain, record.UNKNOWN)
    if stride == 1:
        step = hashing.chain_step(previous, identity)
        expected_chain = np.where(chained, step, record.UNKNOWN)
        wrong_chain = (expected_chain != record.UNKNOWN) & (chain != expected_chain)
        wrong_token = (expected_token != record.UNKNOWN) & (token != expected_token)
    else:
        fold = hashing.chain_fold(chain, previous, stride)
        expected_token = np.where(chained, fold, record.UNKNOWN)
        wrong_chain = chained & (token != fold)
        wrong_token = np.zeros_like(wrong_chain)

    reasons = (position != lanes.positions) * int(Reason.POSITION)
    reasons |= wrong_token * int(Reason.TOKEN)
    reasons |= wrong_chain * int(Reason.CHAIN)
    if reports_stale_weights:
        begins = _begins_stale_run(lanes, records, writer, report)
        reasons = np.where(begins & (reasons == 0), int(Reason.STALE_WEIGHTS), reasons)
    reasons = np.where(states == record.State.LIVE, reasons, not_live)
    reasons = np.where(readable, reasons, lanes.reasons)

    def stored(value: np.ndarray, otherwise: np.ndarray | int = record.UNKNOWN) -> Callable:
        return lambda: np.where(readable, value, otherwise)

    def last_writer() -> np.ndarray:
        freed = not_live & int(Reason.USE_AFTER_FREE | Reason.UNWRITTEN_SINCE_ALLOC)
        return np.where(readable & (freed != 0), words[:, record.WORD_CONTENT], 0)

    report.append(
        reasons,
        slot=stored(lanes.slots),
        full_slot=lanes.full_slots,
        prev_slot=lanes.prev_slots,
        expected_position=lanes.positions,
        stored_position=stored(position),
        expected_token=stored(expected_token, lanes.expected_tokens),
        stored_token=stored(token),
        expected_chain=stored(expected_chain),
        stored_chain=stored(chain),
        reader_row=lanes.rows,
        writer=stored(writer),
        last_writer=last_writer,
    )


def _begins_stale_run(
    lanes: Lanes, records: np.ndarray, writer: np.ndarray, report: Report
) -> np.ndarray:
    """Whether old weights wrote a slot, and not its readable, live predecessor."""
    forward, since = report.forward, int(report.state.summary[Header.WEIGHTS_SINCE])
    if since == 0:
        return np.zeros_like(lanes.slots, dtype=bool)
    has_prev = lanes.prev_slots >= 0
    before = records[lanes.prev_slots * has_prev, record.WORD_WRITER]
    goes_on = has_prev & (hashing.state_of(before) == record.State.LIVE)

    def is_stale(word: np.ndarray) -> np.ndarray:
        return record.forwards_between(word, forward) >= forward - since

    return is_stale(writer) & ~(goes_on & is_stale(before))


def _previous_chain(lanes: Lanes, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(chain of each slot's predecessor, whether it is known)."""
    has_prev = lanes.prev_slots >= 0
    prev = records[lanes.prev_slots * has_prev]
    prev_live = hashing.state_of(prev[:, record.WORD_WRITER]) == record.State.LIVE
    previous = np.where(has_prev, prev[:, record.WORD_CHAIN], lanes.anchors)
    return previous, (has_prev & prev_live) | (lanes.prev_slots == record.PREV_ANCHOR)
