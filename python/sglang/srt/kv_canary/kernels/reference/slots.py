"""What the allocator did to slots: freed, handed out, cleared; and records that move with their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...endpoint import CanaryLaunchTag
from ...pool_kind import Side
from ...record import Mode, Reason, State
from ...slot_event import MOST_CALLS, SlotEventKind
from ...state import CanaryDeviceState, Header
from . import hashing
from .host import array, longs
from .ring import Report


def apply_slot_event(
    kind: SlotEventKind,
    slots: torch.Tensor | None,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    page_size: int = 1,
    call_ids: torch.Tensor | None = None,
) -> None:
    """Apply one allocator event to all records of `group`; arguments as of `triton.slots.apply_slot_event`."""
    forward = int(state.summary[Header.FORWARD_DONE])
    clears = kind is SlotEventKind.CLEAR
    listed = np.arange(group.num_slots) * group.stride if clears else longs(slots)
    own = listed // group.stride
    calls = np.zeros_like(own) if call_ids is None else longs(call_ids)
    speaks = _first_of_its_slot(own, calls, group)
    inside = (own > 0) & (own < group.num_slots)
    own, listed, calls, speaks = own[inside], listed[inside], calls[inside], speaks[inside]
    if kind is SlotEventKind.ALLOC:
        _mark_allocated(group, np.unique(own))
        return
    if kind is SlotEventKind.UNFILL:
        _mark_unfilled(group, own, record.pack_writer(forward, 0, Mode.NONE, State.UNFILLED))
        return
    if kind is SlotEventKind.FREE:
        repeated = _repeated(group, listed, calls, page_size)[speaks]
        report = Report(state, CanaryLaunchTag(group.kind, "K", Side.HEAD).id, forward)
        _report_double_free(group, own[speaks], listed[speaks], repeated, report)
        first = listed // page_size * page_size // group.stride
        page = np.arange(-(-page_size // group.stride))
        own = (first[:, None] + page).ravel()
        own = own[own < group.num_slots]
    mode = Mode.CLEAR if clears else Mode.FREE
    _mark_freed(group, np.unique(own), record.pack_writer(forward, 0, mode, State.FREED))


def apply_slot_runs(
    runs: Sequence[tuple[SlotEventKind, int]],
    slots: torch.Tensor,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    page_size: int = 1,
    call_ids: torch.Tensor | None = None,
) -> None:
    """Apply ALLOCs and FREEs, in order; arguments as of `triton.slots.apply_slot_runs`."""
    start = 0
    for kind, count in runs:
        listed = slots[start : start + count]
        ids = None if call_ids is None else call_ids[start : start + count]
        apply_slot_event(kind, listed, group, state, page_size, ids)
        start += count


def _first_of_its_slot(
    slots: np.ndarray, calls: np.ndarray, group: CanaryBufferGroup
) -> np.ndarray:
    """Of a call's tokens of one strided slot, which are neighbours in the list, the first one; of other groups all."""
    first = np.ones_like(slots, dtype=bool)
    if group.stride != 1:
        first[1:] = (slots[1:] != slots[:-1]) | (calls[1:] != calls[:-1])
    return first


def _repeated(
    group: CanaryBufferGroup, listed: np.ndarray, calls: np.ndarray, page_size: int
) -> np.ndarray:
    """Listed slots whose page an earlier call listed; of single slots, those that are in the list before."""
    if page_size == 1 and group.stride == 1:
        calls = np.arange(listed.shape[0])
    pages = listed // page_size
    first_call = np.full(group.num_slots * group.stride, MOST_CALLS + listed.shape[0])
    np.minimum.at(first_call, pages, calls)
    return calls > first_call[pages]


def _buffers(group: CanaryBufferGroup) -> list[np.ndarray]:
    return [
        array(group.records(half, side)) for half in group.halves for side in (Side.HEAD, Side.TAIL)
    ]


def _mark_allocated(group: CanaryBufferGroup, slots: np.ndarray) -> None:
    for records in _buffers(group):
        writer = records[slots, record.WORD_WRITER]
        freed = hashing.state_of(writer) == State.FREED
        allocated = writer ^ record.to_signed64(record.FREED_TO_ALLOCATED)
        records[slots, record.WORD_WRITER] = np.where(freed, allocated, writer)


def _mark_unfilled(group: CanaryBufferGroup, slots: np.ndarray, word: int) -> None:
    for records in _buffers(group):
        records[slots, record.WORD_WRITER] = word
        records[slots, record.WORD_CONTENT] = 0


def _mark_freed(group: CanaryBufferGroup, slots: np.ndarray, freed_word: int) -> None:
    """Live records keep their last writer in the content word, damaged ones their word; never-written ones stay."""
    for records in _buffers(group):
        words = records[slots]
        states = hashing.state_of(words[:, record.WORD_WRITER])
        written = (states == State.LIVE) | (states == record.DAMAGED)
        words[written, record.WORD_CONTENT] = words[written, record.WORD_WRITER]
        freed = (states != State.NEVER_WRITTEN) & (states != State.FREED)
        words[freed, record.WORD_WRITER] = freed_word
        records[slots] = words


def _report_double_free(
    group: CanaryBufferGroup,
    slots: np.ndarray,
    listed: np.ndarray,
    repeated: np.ndarray,
    report: Report,
) -> None:
    """A slot that is freed while free, or `repeated`."""
    words = array(group.k_head)[slots]
    states = hashing.state_of(words[:, record.WORD_WRITER])
    twice = (states == State.FREED) | (repeated & (states != State.NEVER_WRITTEN))
    report.append(
        twice * int(Reason.DOUBLE_FREE),
        slot=slots,
        full_slot=listed,
        stored_position=hashing.stored_position(words[:, record.WORD_IDENTITY]),
        stored_token=hashing.stored_token(words[:, record.WORD_IDENTITY]),
        stored_chain=words[:, record.WORD_CHAIN],
        reader_row=0,
        writer=words[:, record.WORD_WRITER],
        last_writer=words[:, record.WORD_CONTENT],
    )


def copy_records(
    group: CanaryBufferGroup, source_slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """Copy all records between slots (group's slot space), as move_kv_cache does the bytes."""
    for records in _buffers(group):
        records[longs(target_slots)] = records[longs(source_slots)]
