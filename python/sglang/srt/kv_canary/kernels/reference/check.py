"""The check of one slot, shared by the per-forward spans and the sweep's flat list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...record import Reason
from ...state import Header
from . import hashing
from .ring import Report


@dataclass(frozen=True, slots=True)
class Lanes:
    """Slots to check, int64[n] each."""

    slots: torch.Tensor
    full_slots: torch.Tensor
    prev_slots: torch.Tensor  # or PREV_ANCHOR / PREV_UNREACHABLE
    positions: torch.Tensor
    anchors: torch.Tensor
    expected_tokens: torch.Tensor  # UNKNOWN where the token is not known
    rows: torch.Tensor  # reader's request row
    reasons: torch.Tensor  # what is wrong before the record is read; such lanes are not read


def translate(
    group: CanaryBufferGroup, full_slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot in the group's space, reasons) of full slots; lanes with reasons have slot 0."""
    lut = group.swa_index_lut
    limit = group.num_slots * group.stride if lut is None else lut.shape[0]
    bad = (full_slots < 0) | (full_slots >= limit)
    below = full_slots < group.stride  # slot 0 of the group's own space
    reasons = torch.where(below, int(Reason.UNMAPPED_SLOT), 0)
    reasons = torch.where(bad, int(Reason.SLOT_OUT_OF_RANGE), reasons)
    safe = torch.where(bad | below, 0, full_slots)
    if lut is None:
        return torch.div(safe, group.stride, rounding_mode="floor"), reasons
    slots = lut[safe].long()
    outside = (slots < 0) | (slots >= group.num_slots)
    mapped = torch.where(slots == 0, int(Reason.SWA_EVICTED_IN_WINDOW), 0)
    mapped = torch.where(outside, int(Reason.SLOT_OUT_OF_RANGE), mapped)
    reasons = torch.where(reasons == 0, mapped, reasons)
    return torch.where(reasons == 0, slots, 0), reasons


def state_reasons(states: torch.Tensor, unfills: bool) -> torch.Tensor:
    """Reason bits of record states other than live. With `unfills`, an unfilled record has none."""
    reasons = [int(Reason.BAD_STATE)] * (record.DAMAGED + 1)
    if unfills:
        reasons[record.State.UNFILLED] = 0
    reasons[record.State.NEVER_WRITTEN] = int(Reason.NEVER_WRITTEN)
    reasons[record.State.FREED] = int(Reason.USE_AFTER_FREE)
    reasons[record.State.ALLOCATED] = int(Reason.UNWRITTEN_SINCE_ALLOC)
    return torch.tensor(reasons, device=states.device)[states]


def check_lanes(
    lanes: Lanes,
    group: CanaryBufferGroup,
    records: torch.Tensor,
    report: Report,
    reports_stale_weights: bool = False,
) -> None:
    """Check `lanes` against `records` int64[num_slots, 4] of `group` and append what fails to the ring.

    Without a chain source, chains step from `records` themselves and no record is unfilled. Lanes of a strided group
    expect no token. The ring gets folds of chains (`record.chain_fold`) as their tokens. `reports_stale_weights`
    reports the first slot of each run that earlier weights wrote.
    """
    if lanes.slots.numel() == 0:
        return
    chain_source, stride = group.chain_source, group.stride
    readable = lanes.reasons == 0
    words = records[torch.where(readable, lanes.slots, 0)]
    identity, chain = words[:, record.WORD_IDENTITY], words[:, record.WORD_CHAIN]
    writer = words[:, record.WORD_WRITER]
    position, token = hashing.stored_position(identity), hashing.stored_token(identity)
    states = hashing.state_of(writer)
    not_live = state_reasons(states, unfills=chain_source is not None)
    chained_to = records if chain_source is None else chain_source
    previous, chained = _previous_chain(lanes, chained_to)
    expected_token = lanes.expected_tokens
    expected_chain = torch.full_like(chain, record.UNKNOWN)
    if stride == 1:
        step = hashing.chain_step(previous, identity)
        expected_chain = torch.where(chained, step, record.UNKNOWN)
        wrong_chain = (expected_chain != record.UNKNOWN) & (chain != expected_chain)
        wrong_token = (expected_token != record.UNKNOWN) & (token != expected_token)
    else:
        fold = hashing.chain_fold(chain, previous, stride)
        expected_token = torch.where(chained, fold, record.UNKNOWN)
        wrong_chain = chained & (token != fold)
        wrong_token = torch.zeros_like(wrong_chain)

    reasons = torch.where(position != lanes.positions, int(Reason.POSITION), 0)
    reasons |= torch.where(wrong_token, int(Reason.TOKEN), 0)
    reasons |= torch.where(wrong_chain, int(Reason.CHAIN), 0)
    if reports_stale_weights:
        begins = _begins_stale_run(lanes, records, writer, report)
        reasons = torch.where(begins & (reasons == 0), int(Reason.STALE_WEIGHTS), reasons)
    reasons = torch.where(states == record.State.LIVE, reasons, not_live)
    reasons = torch.where(readable, reasons, lanes.reasons)

    def stored(value: torch.Tensor, otherwise: torch.Tensor | int = record.UNKNOWN) -> Callable:
        return lambda: torch.where(readable, value, otherwise)

    def last_writer() -> torch.Tensor:
        freed = not_live & int(Reason.USE_AFTER_FREE | Reason.UNWRITTEN_SINCE_ALLOC)
        return torch.where(readable & (freed != 0), words[:, record.WORD_CONTENT], 0)

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
    lanes: Lanes, records: torch.Tensor, writer: torch.Tensor, report: Report
) -> torch.Tensor:
    """Whether old weights wrote a slot, and not its readable, live predecessor."""
    forward, since = report.forward, int(report.state.summary[Header.WEIGHTS_SINCE])
    if since == 0:
        return torch.zeros_like(lanes.slots, dtype=torch.bool)
    has_prev = lanes.prev_slots >= 0
    before = records[torch.where(has_prev, lanes.prev_slots, 0), record.WORD_WRITER]
    goes_on = has_prev & (hashing.state_of(before) == record.State.LIVE)

    def is_stale(word: torch.Tensor) -> torch.Tensor:
        return ((forward - word) & record.FORWARD_MASK) >= forward - since

    return is_stale(writer) & ~(goes_on & is_stale(before))


def _previous_chain(lanes: Lanes, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(chain of each slot's predecessor, whether it is known)."""
    has_prev = lanes.prev_slots >= 0
    prev = records[torch.where(has_prev, lanes.prev_slots, 0)]
    prev_live = hashing.state_of(prev[:, record.WORD_WRITER]) == record.State.LIVE
    previous = torch.where(has_prev, prev[:, record.WORD_CHAIN], lanes.anchors)
    return previous, (has_prev & prev_live) | (lanes.prev_slots == record.PREV_ANCHOR)
