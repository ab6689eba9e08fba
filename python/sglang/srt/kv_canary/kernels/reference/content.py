"""Content fingerprints: hash of the real K or V bytes of a slot over all content sources of its half."""

from __future__ import annotations

import torch

from ... import record
from ...buffer_group import CanaryBufferGroup, ContentSource, Side
from ...config import ContentMode
from ...endpoint import CanaryLaunchTag
from ...plan.plan_input import ForwardPlan, SweepVerifyPlan
from ...record import Reason
from ...state import CanaryDeviceState, Header, TagCounter
from ..layout import content_unit, slots_between_visits, turn_of
from . import hashing, ring
from .spans import completed_slots, requests_of, slots_at


def prepare(group: CanaryBufferGroup) -> None:
    """Nothing here needs to be done before the first forward."""


def _bytes_of(source: ContentSource, slots: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """uint8 values at byte `offsets` int64[n, m] of the rows of `slots` int64[n]; 0 beyond the row."""
    data = source.data
    storage = data.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=data.device).set_(storage)
    first = data.storage_offset() * data.element_size() + source.offset
    start = (slots // source.page_size) * source.page_stride
    start = start + (slots % source.page_size) * source.token_stride + first
    inside = offsets < source.row_bytes
    index = torch.where(inside, start[:, None] + offsets, first)
    return torch.where(inside, flat[index].long(), 0)


def _word_values(source: ContentSource, slots, words, unit: int) -> torch.Tensor:
    """Unsigned value of word `words` int64[n, m] of each slot's row, `unit` bytes a word."""
    value = torch.zeros_like(words)
    for byte in range(unit):
        value |= _bytes_of(source, slots, words * unit + byte) << (8 * byte)
    return value


def _words_read(source: ContentSource, index: int, slots, unit: int, mode: ContentMode):
    """Word indices int64[n, m] of a row that `mode` reads."""
    count = -(-source.row_bytes // unit)
    if mode is ContentMode.ALL:
        return torch.arange(count, device=slots.device).expand(slots.shape[0], count)
    per_sector = record.SECTOR_BYTES // unit
    sectors = -(-source.row_bytes // record.SECTOR_BYTES)
    mixed = hashing.shift_right(hashing.mix64((slots << 16) + index), 33)
    first = (mixed % sectors) * per_sector
    return first[:, None] + torch.arange(per_sector, device=slots.device)


def content_fingerprint(
    sources: tuple[ContentSource, ...], slots: torch.Tensor, mode: ContentMode
) -> torch.Tensor:
    """Fingerprint int64[n] of `slots` int64[n] (in the group's own slot space)."""
    unit = content_unit(sources)
    total = torch.full_like(slots, record.to_signed64(record.CONTENT_BASE))
    for index, source in enumerate(sources):
        words = _words_read(source, index, slots, unit, mode)
        source_key = record.to_signed64(record.mix64(index + record.CONTENT_SOURCE_SALT) | 1)
        keys = (hashing.mix64(words) * source_key) | 1
        total = total + (_word_values(source, slots, words, unit) * keys).sum(dim=1)
    return total


def check_and_write_content(
    plan: ForwardPlan,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    mode: ContentMode,
    budget_slots: int,
) -> None:
    """Fingerprint the forward's new slots, and re-read every k-th position of its prefix.

    k is the smallest with which about `budget_slots` slots are re-read, each request's share rounded up.
    """
    forward = int(state.summary[Header.FORWARD_DONE])
    if not int(state.summary[Header.ARMED]):
        return
    read_slots, read_rows, read_full = _rotating_slots(plan, group, forward, budget_slots)
    for half in group.halves:
        if group.content(half):
            tag_id = CanaryLaunchTag(group.kind, half, Side.TAIL).id
            tail, sources = group.records(half, Side.TAIL), group.content(half)
            _compare(tail, sources, read_slots, read_full, read_rows, tag_id, forward, state, mode)
            _write(plan, group, half, forward, state, mode)


def _write(plan, group, half: str, forward: int, state, mode) -> None:
    tail, tag_id = group.records(half, Side.TAIL), CanaryLaunchTag(group.kind, half, Side.TAIL).id
    slots = completed_slots(plan, group)
    fresh = (tail[slots, record.WORD_WRITER] & record.FORWARD_MASK) == (
        forward & record.FORWARD_MASK
    )
    slots = slots[fresh]
    tail[slots, record.WORD_CONTENT] = content_fingerprint(group.content(half), slots, mode)
    state.counters[tag_id, TagCounter.CONTENT_WRITTEN] += slots.numel()


def _rotating_slots(plan, group, forward: int, budget_slots: int):
    """(slots, rows, full slots) of the prefix positions (of strided groups: slots) whose turn it is."""
    requests = requests_of(plan, group.window).in_slots(group.stride)
    counts = torch.where(requests.valid, requests.prefix_lens - requests.window_starts, 0)
    k = slots_between_visits(int(counts.sum()), budget_slots)
    index = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)
    positions = torch.arange(index.shape[0], device=counts.device)
    positions = positions - (counts.cumsum(0) - counts)[index] + requests.window_starts[index]
    turn = positions % k == turn_of(forward, k)
    rows, positions = requests.rows[index[turn]], positions[turn]
    slots, full, reasons = slots_at(plan, group, rows, positions)
    return slots[reasons == 0], rows[reasons == 0], full[reasons == 0]


def _compare(tail, sources, slots, full, rows, tag_id, forward, state, mode) -> None:
    words = tail[slots]
    writer, stored = words[:, record.WORD_WRITER], words[:, record.WORD_CONTENT]
    has = (hashing.state_of(writer) == record.State.LIVE) & (stored != 0)
    now = content_fingerprint(sources, slots, mode)
    ring.append(
        state,
        torch.where(has & (now != stored), int(Reason.CONTENT), 0),
        tag=tag_id,
        slot=slots,
        full_slot=full,
        stored_position=hashing.stored_position(words[:, record.WORD_IDENTITY]),
        stored_token=hashing.stored_token(words[:, record.WORD_IDENTITY]),
        stored_chain=words[:, record.WORD_CHAIN],
        expected_content=now,
        stored_content=stored,
        reader_row=rows,
        reader_forward=forward,
        writer=writer,
        last_writer=0,
    )
    state.counters[tag_id, TagCounter.CONTENT_CHECKED] += has.sum()


def check_list_content(
    plan: SweepVerifyPlan, group: CanaryBufferGroup, state: CanaryDeviceState, mode: ContentMode
) -> None:
    """Compare the content of a flat list of slots (in the group's slot space; 0 = skip)."""
    forward = int(state.summary[Header.FORWARD_DONE])
    if not int(state.summary[Header.ARMED]):
        return
    slots = plan.slots[(plan.slots > 0) & (plan.slots < group.num_slots)]
    for half in group.halves:
        tag_id = CanaryLaunchTag(group.kind, half, Side.SWEEP).id
        if group.content(half):
            _compare(
                group.records(half, Side.TAIL),
                group.content(half),
                slots,
                slots,
                torch.zeros_like(slots),
                tag_id,
                forward,
                state,
                mode,
            )
