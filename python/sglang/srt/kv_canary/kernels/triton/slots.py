"""Host side of allocator events and moved records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...buffer_group import CanaryBufferGroup
from ...host_code import HOST
from ...pool_kind import Side
from ...record import Mode, State
from ...slot_event import MOST_CALLS, SlotEventKind
from ...state import CanaryDeviceState
from .device import slot_runs_kernel as runs_in_one
from .device.slots_kernel import copy_kernel, slot_event_kernel
from .kernel_launcher import FixedArguments, KernelLauncher
from .launch import dense, grid_of, record_arguments, report_arguments

BLOCK = 256
NUM_WARPS = 4
PROGRAMS_PER_SM = 8
# One program works on all runs of a step, while nothing else runs. Its loads wait for memory, so it has many at once.
RUNS_BLOCK, RUNS_WARPS = 512, 16
ONE_PROGRAM_SLOTS = 2048  # a FREE, or several runs, of at most so many slots in all are one launch
COPY_SLOTS = 2048  # moved in one launch, at most
RUNS = int(runs_in_one.RUNS)  # in one launch, at most
_END_BITS, _FREE_FIRST = int(runs_in_one.END_BITS), 1 << int(runs_in_one.FREE_FIRST_BIT)
_LARGE = (
    2 * _FREE_FIRST
)  # an integer that does not fit in 32 bits whatever the runs are: one variant
_launch_event, _launch_copy = KernelLauncher(slot_event_kernel), KernelLauncher(copy_kernel)
_launch_runs = KernelLauncher(runs_in_one.slot_runs_kernel)

SlotRun = tuple[SlotEventKind, int]  # ALLOC or FREE, and how many slots it has

_WRITES: dict[SlotEventKind, tuple[Mode, State]] = {
    SlotEventKind.ALLOC: (Mode.NONE, State.ALLOCATED),
    SlotEventKind.FREE: (Mode.FREE, State.FREED),
    SlotEventKind.CLEAR: (Mode.CLEAR, State.FREED),
    SlotEventKind.UNFILL: (Mode.NONE, State.UNFILLED),
}


def apply_slot_event(
    kind: SlotEventKind,
    slots: torch.Tensor | None,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    page_size: int = 1,
    call_ids: torch.Tensor | None = None,
) -> None:
    """Apply one allocator event to all records of `group`.

    FREE, ALLOC and UNFILL take slots in the group's slot space, of strided groups full slots; a FREE gives back whole
    pages of `page_size` of them. CLEAR takes None: every slot. Slots outside of the pool are ignored.

    `call_ids`: int32[slots], of a FREE of pages: which of up to MOST_CALLS calls listed each slot, in ascending order;
    None: one call. A call may list a page several times, two calls must not. A single slot may be listed once at all.
    """
    size = group.num_slots if kind is SlotEventKind.CLEAR else slots.shape[0]
    if size == 0:
        return
    device = group.k_head.device
    grid = grid_of(-(-size // BLOCK), device, PROGRAMS_PER_SM)
    free = kind is SlotEventKind.FREE
    by_call = free and page_size > 1 and call_ids is not None
    if by_call:
        _refuse_split_slots(group, page_size)
    number = group.free_marks.take(MOST_CALLS if by_call else 1) if free else 0
    phases = (by_call, free, True)  # tag, check, mark
    launches = [(grid, phases)]
    # Each phase of a FREE has seen every slot before the next begins: within a program, or launch after launch.
    if free and size <= ONE_PROGRAM_SLOTS:
        launches = [((1,), phases)]
    elif free:
        steps = ((True, False, False), (False, True, False), (False, False, True))
        launches = [(grid, step) for step in (steps if by_call else steps[1:])]
    fixed = HOST.prepared_for(
        state.prepared,
        ("slot event", kind, page_size),
        (group,),
        lambda: FixedArguments(_fixed_arguments(kind, group, state, page_size)),
    )
    arguments = {
        "slot_list": None if kind is SlotEventKind.CLEAR else dense(slots),
        "call_list": call_ids if by_call else None,
        "size": size,
        "number": number,
    }
    for programs, (tag, check, mark) in launches:
        phase = {"TAG": tag, "CHECK": check, "MARK": mark}
        _launch_event(programs, NUM_WARPS, {**arguments, **phase}, fixed)


def _fixed_arguments(
    kind: SlotEventKind, group: CanaryBufferGroup, state: CanaryDeviceState, page_size: int
) -> dict[str, Any]:
    """Arguments, by name, that are the same for every event of this kind."""
    mode, written = _WRITES[kind]
    return {
        **report_arguments(state, group, Side.HEAD),
        **_slot_arguments(group, page_size, BLOCK),
        "mode": int(mode),
        "state": int(written),
        "KIND": int(kind),
    }


def apply_slot_runs(
    runs: Sequence[SlotRun],
    slots: torch.Tensor,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    page_size: int = 1,
    call_ids: torch.Tensor | None = None,
) -> None:
    """Apply ALLOCs and FREEs to all records of `group`, in order, as `apply_slot_event` does one by one.

    `slots` int64[n] and `call_ids` int32[n] are those of all `runs`, one run's after the other's. In each run calls
    are numbered from 0; those of ALLOCs do not matter. Up to RUNS short runs by turns are one launch.
    """
    start = 0
    for together, size in _launches_of(runs):
        whole = size == slots.shape[0]
        listed = slots if whole else slots[start : start + size]
        ids = call_ids if call_ids is None or whole else call_ids[start : start + size]
        start += size
        if size > ONE_PROGRAM_SLOTS:
            ((kind, _),) = together
            apply_slot_event(kind, listed, group, state, page_size, ids)
        elif size:
            _apply_in_one(together, listed, group, state, page_size, ids)


def _launches_of(runs: Sequence[SlotRun]) -> list[tuple[list[SlotRun], int]]:
    """Runs that are one launch, and their slots. A run that is too long for a program is one by itself."""
    launches: list[tuple[list[SlotRun], int]] = []
    together: list[SlotRun] = []
    room, size = 0, 0
    for run in runs:
        kind, count = run
        needed = 2 if together and together[-1][0] is kind else 1
        if needed > room or size + count > ONE_PROGRAM_SLOTS:
            if together:
                launches.append((together, size))
            together, room, size, needed = [], RUNS, 0, 1
        together.append(run)
        room, size = room - needed, size + count
    if together:
        launches.append((together, size))
    return launches


def packed_runs(runs: Sequence[SlotRun]) -> int:
    """What the kernel takes: where each of RUNS runs ends, END_BITS each, and whether the first one is a FREE.

    They take turns. An empty run lies between two of one kind.
    """
    packed, at, end = _LARGE, 0, 0
    if runs[0][0] is SlotEventKind.FREE:
        packed |= _FREE_FIRST
    before = None
    for kind, count in runs:
        if kind is before:
            packed |= end << at
            at += _END_BITS
        end += count
        packed |= end << at
        at += _END_BITS
        before = kind
    while at < RUNS * _END_BITS:
        packed |= end << at
        at += _END_BITS
    return packed


def _apply_in_one(
    runs: Sequence[SlotRun],
    slots: torch.Tensor,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    page_size: int,
    call_ids: torch.Tensor | None,
) -> None:
    by_call = page_size > 1 and call_ids is not None
    if by_call:
        _refuse_split_slots(group, page_size)
    fixed = HOST.prepared_for(
        state.prepared,
        ("slot runs", page_size),
        (group,),
        lambda: FixedArguments(
            {
                **report_arguments(state, group, Side.HEAD),
                **_slot_arguments(group, page_size, RUNS_BLOCK),
            }
        ),
    )
    arguments = {
        "slot_list": dense(slots),
        "call_list": call_ids if by_call else None,
        "runs": packed_runs(runs),
        "number": group.free_marks.take(RUNS * (MOST_CALLS if by_call else 1)),
    }
    _launch_runs((1,), RUNS_WARPS, arguments, fixed)


def _refuse_split_slots(group: CanaryBufferGroup, page_size: int) -> None:
    if page_size % group.stride:
        raise ValueError(
            f"{group.kind.value}: expected pages of a multiple of {group.stride} full slots, got {page_size}"
        )


def _slot_arguments(group: CanaryBufferGroup, page_size: int, block: int) -> dict[str, Any]:
    """Arguments, by name, of every kernel that applies events. `block`: listed slots at a time."""
    return {
        **record_arguments(group),
        "marks": group.free_marks.marks,
        "page_size": page_size,
        "SINGLE": page_size == 1,
        "STRIDE": group.stride,
        "BLOCK": block,
    }


def copy_records(
    group: CanaryBufferGroup, source_slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """Copy all records between slots (group's slot space), as move_kv_cache does the bytes."""
    size = source_slots.shape[0]
    if size == 0:
        return
    if size > COPY_SLOTS:
        # Too many for one program to read before it writes.
        for half in group.halves:
            for side in (Side.HEAD, Side.TAIL):
                records = group.records(half, side)
                records[target_slots.long()] = records[source_slots.long()]
        return
    arguments = {
        **record_arguments(group),
        "source_list": dense(source_slots),
        "target_list": dense(target_slots),
        "size": size,
        "BLOCK": COPY_SLOTS,  # the same for all sizes: each would be compiled on its own, while requests wait
    }
    _launch_copy((2 * len(group.halves),), 8, arguments)
