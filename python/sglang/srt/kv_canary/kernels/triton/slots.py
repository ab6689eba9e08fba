"""Host side of allocator events and moved records."""

from __future__ import annotations

from typing import Any

import torch

from ...buffer_group import CanaryBufferGroup, Side
from ...record import Mode, State
from ...slot_event import MOST_CALLS, SlotEventKind
from ...state import CanaryDeviceState
from .device.slots_kernel import copy_kernel, slot_event_kernel
from .kernel_launcher import FixedArguments, KernelLauncher
from .launch import dense, grid_of, prepared, record_arguments, report_arguments

BLOCK = 256
NUM_WARPS = 4
PROGRAMS_PER_SM = 8
ONE_PROGRAM_SLOTS = 2048  # a FREE of at most so many slots is checked and marked in one launch
COPY_SLOTS = 2048  # moved in one launch, at most
_launch_event, _launch_copy = KernelLauncher(slot_event_kernel), KernelLauncher(copy_kernel)

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
    if by_call and page_size % group.stride:
        raise ValueError(
            f"{group.kind.value}: expected pages of a multiple of {group.stride} full slots, got {page_size}"
        )
    number = group.free_marks.take(MOST_CALLS if by_call else 1) if free else 0
    phases = (by_call, free, True)  # tag, check, mark
    launches = [(grid, phases)]
    # Each phase of a FREE has seen every slot before the next begins: within a program, or launch after launch.
    if free and size <= ONE_PROGRAM_SLOTS:
        launches = [((1,), phases)]
    elif free:
        steps = ((True, False, False), (False, True, False), (False, False, True))
        launches = [(grid, step) for step in (steps if by_call else steps[1:])]
    fixed = prepared(
        state,
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
        **record_arguments(group),
        "marks": group.free_marks.marks,
        "page_size": page_size,
        "mode": int(mode),
        "state": int(written),
        "KIND": int(kind),
        "SINGLE": page_size == 1,
        "STRIDE": group.stride,
        "BLOCK": BLOCK,
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
