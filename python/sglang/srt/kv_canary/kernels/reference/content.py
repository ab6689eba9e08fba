"""Content fingerprints: hash of the real K or V bytes of a slot over all content sources of its half."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ... import record
from ...buffer_group import CanaryBufferGroup, ContentSource
from ...config import ContentMode
from ...endpoint import CanaryLaunchTag
from ...plan.plan_input import ForwardPlan, SweepVerifyPlan
from ...pool_kind import Side
from ...record import Reason
from ...state import CanaryDeviceState, Header, TagCounter
from ..layout import content_unit, refuse_strided, slots_between_visits, source_key, turn_of
from . import hashing
from .hashing import Words
from .host import array, longs, within
from .ring import Report
from .spans import Launch, completed_slots, requests_of, slots_at

WORDS = {1: torch.uint8, 4: torch.int32}  # by their bytes


def prepare(group: CanaryBufferGroup) -> None:
    """Nothing here needs to be done before the first forward."""


def word_values(source: ContentSource, slots: Words, words: Words, unit: int) -> Words:
    """Unsigned values int64[n, m] of the `words` of each slot's row. A word has `unit` bytes. Beyond the row: 0."""
    data = source.data
    flat = torch.empty(0, dtype=WORDS[unit], device=data.device).set_(data.untyped_storage())
    first = data.storage_offset() * data.element_size() + source.offset
    index = ((source.start_of(slots) + first) // unit)[:, None] + words
    inside = words * unit < source.row_bytes
    if isinstance(index, np.ndarray):
        values = array(flat)[index * inside].astype(np.int64)
    else:
        values = flat[index * inside].long()
    return (values & ((1 << (8 * unit)) - 1)) * inside


def words_read(source: ContentSource, index: int, sampled_by: Words, unit: int, mode: ContentMode):
    """Word indices int64[n, m] of a row that `mode` reads. int64[1, m] where all rows have the same."""
    if mode is ContentMode.ALL:
        return _numbers(-(-source.row_bytes // unit), sampled_by)[None]
    per_sector = record.SECTOR_BYTES // unit
    sectors = -(-source.row_bytes // record.SECTOR_BYTES)
    mixed = hashing.shift_right(hashing.mix64((sampled_by << 16) + index), 33)
    first = (mixed % sectors) * per_sector
    return first[:, None] + _numbers(per_sector, sampled_by)


def _numbers(count: int, like: Words) -> Words:
    """0 .. count - 1, where `like` is."""
    if isinstance(like, np.ndarray):
        return np.arange(count)
    return torch.arange(count, device=like.device)


def word_keys(index: int, words: Words) -> Words:
    """The odd keys of `words` int64 of source number `index`, see `record.CONTENT_BASE`. Same shape."""
    return (hashing.mix64(words) * source_key(index)) | 1


def content_fingerprint(
    sources: tuple[ContentSource, ...],
    slots: Words,
    mode: ContentMode,
    sampled_by: Words | None = None,
) -> Words:
    """Fingerprint int64[n] of `slots` int64[n] (in the group's own slot space).

    `sampled_by` int64[n]: the numbers by which mode `partial` chooses its sectors; None: `slots`. Fingerprints of
    records are sampled by position, see `content_of_records`. 0, which stands for unknown content, where a slot's page
    is unbound.
    """
    sampled_by = slots if sampled_by is None else sampled_by
    unit = content_unit(sources)
    total = slots * 0 + record.to_signed64(record.CONTENT_BASE)
    for index, source in enumerate(sources):
        words = words_read(source, index, sampled_by, unit, mode)
        total = total + (word_values(source, slots, words, unit) * word_keys(index, words)).sum(1)
    return total * has_bytes(sources, slots)


def fingerprint_pieces(
    sources: tuple[ContentSource, ...],
    slots: torch.Tensor,
    pieces: int,
    mode: ContentMode,
    out: torch.Tensor,
    first: int = 0,
) -> None:
    """The fingerprints of `pieces` slots for each of `slots` int[n] go to `out` int64, from `first` on, n * pieces.

    Number s of `slots` stands for the slots from s * pieces on. `sources` has one at least.
    """
    places = (slots.view(-1, 1) * pieces + torch.arange(pieces, device=slots.device)).view(-1)
    out[first : first + len(places)] = content_fingerprint(sources, places.long(), mode)


def content_of_records(
    sources: tuple[ContentSource, ...], slots: Words, mode: ContentMode, words: Words
) -> Words:
    """Fingerprint int64[n] that the records `words` int64[n, RECORD_WORDS] of `slots` int64[n] should hold.

    Mode `partial` samples by position: that stays with a record that goes to another slot, tier or server.
    """
    positions = hashing.stored_position(words[:, record.WORD_IDENTITY])
    return content_fingerprint(sources, slots, mode, positions)


def has_bytes(sources: tuple[ContentSource, ...], slots: Words) -> Words:
    """Whether the page of each slot is bound, bool[n]. All sources of a group have the same page table."""
    table = sources[0].page_table if sources else None
    return slots == slots if table is None else table.locate(slots) > 0


def renew_content(
    group: CanaryBufferGroup,
    slots: torch.Tensor,
    mode: ContentMode,
    only_unknown: bool = False,
) -> None:
    """Fingerprint live ones of `slots` as they are now; arguments as of `triton.content.renew_content`."""
    listed = longs(slots)
    inside = (listed > 0) & (listed < group.num_slots)
    own = listed[inside]
    for half in group.halves:
        sources = group.content(half)
        if not sources:
            continue
        tail = array(group.records(half, Side.TAIL))
        renewed = hashing.state_of(tail[own, record.WORD_WRITER]) == record.State.LIVE
        if only_unknown:
            renewed &= tail[own, record.WORD_CONTENT] == 0
        live = own[renewed]
        tail[live, record.WORD_CONTENT] = content_of_records(sources, live, mode, tail[live])


def check_and_write_content(
    plan: ForwardPlan,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    mode: ContentMode,
    budget_slots: int,
    writes: bool = True,
) -> None:
    """Fingerprint the forward's new slots, and re-read every k-th position of its prefix.

    k is the smallest with which about `budget_slots` slots are re-read, each request's share rounded up. Without
    `writes` the new slots are left to `write_content`.
    """
    launch = _launch_of(plan, group, state, Header.FORWARD_RUNNING)
    if launch is None:
        return
    reads = _rotating_slots(launch.in_slots(), budget_slots)
    for half in group.halves:
        if group.content(half):
            _compare(group, half, reads, launch.report(half), mode)
            if writes:
                _write(launch, half, mode)


def write_content(
    plan: ForwardPlan, group: CanaryBufferGroup, state: CanaryDeviceState, mode: ContentMode
) -> None:
    """Fingerprint the new slots of the last forward.

    Raises ValueError for strided groups: which of their slots a forward completes is worked out with its prefixes.
    """
    refuse_strided(group)
    launch = _launch_of(plan, group, state, Header.FORWARD_DONE)
    if launch is None:
        return
    for half in group.halves:
        if group.content(half):
            _write(launch, half, mode)


def _launch_of(
    plan: ForwardPlan, group: CanaryBufferGroup, state: CanaryDeviceState, number: Header
) -> Launch | None:
    """Of the forward that `number` holds. None: forwards are not checked."""
    if not int(state.summary[Header.ARMED]):
        return None
    forward = int(state.summary[number])
    return Launch(plan, group, Side.TAIL, state, forward, requests_of(plan, group.window))


def _write(launch: Launch, half: str, mode: ContentMode) -> None:
    group, tail = launch.group, launch.records(half)
    slots = completed_slots(launch.plan, group)
    fresh = (tail[slots, record.WORD_WRITER] & record.FORWARD_MASK) == (
        launch.forward & record.FORWARD_MASK
    )
    slots = slots[fresh]
    slots = slots[has_bytes(group.content(half), slots)]
    now = content_of_records(group.content(half), slots, mode, tail[slots])
    tail[slots, record.WORD_CONTENT] = now
    launch.report(half).count(TagCounter.CONTENT_WRITTEN, slots.size)


@dataclass(frozen=True, slots=True)
class _Reads:
    """Slots whose content is compared, int64[n] each."""

    slots: np.ndarray
    rows: np.ndarray  # reader's request row
    full_slots: np.ndarray


def _rotating_slots(launch: Launch, budget_slots: int) -> _Reads:
    """The prefix positions (of strided groups: slots) whose turn it is."""
    requests, forward = launch.requests, launch.forward
    counts = requests.prefix_in_window
    k = slots_between_visits(int(counts.sum()), budget_slots)
    index, positions = within(counts)
    positions = positions + requests.window_starts[index]
    turn = positions % k == turn_of(forward, k)
    rows, positions = requests.rows[index[turn]], positions[turn]
    slots, full, reasons = slots_at(launch.plan, launch.group, rows, positions)
    return _Reads(slots[reasons == 0], rows[reasons == 0], full[reasons == 0])


def _compare(
    group: CanaryBufferGroup, half: str, reads: _Reads, report: Report, mode: ContentMode
) -> None:
    slots = reads.slots
    words = array(group.records(half, Side.TAIL))[slots]
    writer, stored = words[:, record.WORD_WRITER], words[:, record.WORD_CONTENT]
    has = (hashing.state_of(writer) == record.State.LIVE) & (stored != 0)
    has &= has_bytes(group.content(half), slots)
    now = content_of_records(group.content(half), slots, mode, words)
    report.append(
        (has & (now != stored)) * int(Reason.CONTENT),
        slot=slots,
        full_slot=reads.full_slots,
        stored_position=lambda: hashing.stored_position(words[:, record.WORD_IDENTITY]),
        stored_token=lambda: hashing.stored_token(words[:, record.WORD_IDENTITY]),
        stored_chain=words[:, record.WORD_CHAIN],
        expected_content=now,
        stored_content=stored,
        reader_row=reads.rows,
        writer=writer,
    )
    report.count(TagCounter.CONTENT_CHECKED, has.sum())


def check_list_content(
    plan: SweepVerifyPlan, group: CanaryBufferGroup, state: CanaryDeviceState, mode: ContentMode
) -> None:
    """Compare the content of a flat list of slots (in the group's slot space; 0 = skip)."""
    forward = int(state.summary[Header.FORWARD_DONE])
    if not int(state.summary[Header.ARMED]):
        return
    listed = array(plan.slots)
    slots = listed[(listed > 0) & (listed < group.num_slots)]
    reads = _Reads(slots, np.zeros_like(slots), slots)
    for half in group.halves:
        if group.content(half):
            report = Report(state, CanaryLaunchTag(group.kind, half, Side.SWEEP).id, forward)
            _compare(group, half, reads, report, mode)
