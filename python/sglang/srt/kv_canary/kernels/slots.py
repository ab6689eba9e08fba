"""Host side of allocator events and moved records."""

from __future__ import annotations

import torch

from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup
from sglang.srt.kv_canary.endpoint import CanaryLaunchTag, Side
from sglang.srt.kv_canary.kernels.launch import dense, grid_of
from sglang.srt.kv_canary.kernels.slots_kernel import copy_kernel, slot_event_kernel
from sglang.srt.kv_canary.record import Mode, State
from sglang.srt.kv_canary.slot_event import SlotEventKind
from sglang.srt.kv_canary.state import CanaryDeviceState

BLOCK = 256
NUM_WARPS = 4
PROGRAMS_PER_SM = 8
ONE_PROGRAM_SLOTS = 2048  # a FREE of at most so many slots is checked and marked in one launch
COPY_SLOTS = 2048  # moved in one launch, at most

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
) -> None:
    """Apply one allocator event to all records of `group`.

    FREE, ALLOC and UNFILL take slots in the group's slot space, of strided groups full slots; a FREE gives back whole
    pages of `page_size` of them. CLEAR takes None: every slot. Slots outside of the pool are ignored.
    """
    size = group.num_slots if kind is SlotEventKind.CLEAR else slots.shape[0]
    if size == 0:
        return
    device = group.k_head.device
    grid = grid_of(-(-size // BLOCK), device, PROGRAMS_PER_SM)
    free = kind is SlotEventKind.FREE
    launches = [(grid, free, True)]
    # Every slot of a FREE is looked at before one is marked: within a program, or launch after launch.
    if free:
        small = size <= ONE_PROGRAM_SLOTS
        launches = [((1,), True, True)] if small else [(grid, True, False), (grid, False, True)]
    mode, written = _WRITES[kind]
    for programs, check, mark in launches:
        slot_event_kernel[programs](
            state.summary,
            state.violations.rows,
            None if kind is SlotEventKind.CLEAR else dense(slots),
            group.k_head,
            group.k_tail,
            group.v_head,
            group.v_tail,
            size,
            group.num_slots,
            state.violations.capacity,
            CanaryLaunchTag(group.kind, "K", Side.HEAD).id,
            page_size,
            int(mode),
            int(written),
            KIND=int(kind),
            CHECK=check,
            MARK=mark,
            SINGLE=page_size == 1,
            STRIDE=group.stride,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


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
            for side in ("HEAD", "TAIL"):
                records = group.records(half, side)
                records[target_slots.long()] = records[source_slots.long()]
        return
    copy_kernel[(2 * len(group.halves),)](
        dense(source_slots),
        dense(target_slots),
        group.k_head,
        group.k_tail,
        group.v_head,
        group.v_tail,
        size,
        group.num_slots,
        BLOCK=COPY_SLOTS,  # the same for all sizes: each would be compiled on its own, while requests wait
        num_warps=8,
    )
