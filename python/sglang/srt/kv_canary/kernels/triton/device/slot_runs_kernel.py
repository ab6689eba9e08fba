"""Several allocator events in one launch: runs of slots that were handed out and freed, by turns."""

from __future__ import annotations

import triton.language as tl

from ....record import Mode, State
from ....slot_event import MOST_CALLS as _MOST_CALLS
from ..jit import jit
from .record import pack_writer
from .report import FORWARD_DONE, Report
from .slots_kernel import (
    ALLOC,
    FREE,
    check_frees,
    mark_listed,
    mark_pages,
    tag_calls,
)

RUNS = tl.constexpr(5)
END_BITS = tl.constexpr(12)
END_MASK = tl.constexpr((1 << 12) - 1)
FREE_FIRST_BIT = tl.constexpr(5 * 12)
MOST_CALLS = tl.constexpr(_MOST_CALLS)
MODE_FREE = tl.constexpr(int(Mode.FREE))
STATE_FREED = tl.constexpr(int(State.FREED))


@jit
def _end_of(runs, run):
    """Where a run ends in the list."""
    return ((runs >> (run * END_BITS)) & END_MASK).to(tl.int32)


@jit(
    do_not_specialize=["runs", "num_slots", "capacity", "tag", "page_size", "number"],
    do_not_specialize_on_alignment=["slot_list", "call_list"],
)
def slot_runs_kernel(
    summary,
    ring,
    slot_list,
    call_list,  # see slots.apply_slot_runs
    marks,  # see FreeMarks
    k_head,
    k_tail,
    v_head,  # None: the group has only K
    v_tail,
    runs,  # see slots.packed_runs
    num_slots,
    capacity,
    tag,
    page_size,
    number,  # the highest that the last run took, its first call's
    SINGLE: tl.constexpr,  # pages are single slots
    STRIDE: tl.constexpr,  # listed slots per slot
    BLOCK: tl.constexpr,
):
    """One program, so that each run, and each phase of a FREE, has seen every slot before the next begins."""
    forward = tl.load(summary + FORWARD_DONE)
    mode = (forward * 0 + MODE_FREE).to(tl.int64)
    freed = pack_writer(forward, forward * 0, mode, mode * 0 + STATE_FREED)
    free_first = ((runs >> FREE_FIRST_BIT) & 1).to(tl.int32)
    for run in range(RUNS):
        start = tl.where(run == 0, 0, _end_of(runs, tl.maximum(run - 1, 0)))
        size = _end_of(runs, run) - start
        items = (size + (BLOCK - 1)) // BLOCK
        slots = slot_list + start
        calls = call_list
        its_number = number - (RUNS - 1 - run)
        if call_list is not None:
            calls = call_list + start
            its_number = number - (RUNS - 1 - run) * MOST_CALLS
        if ((run & 1) ^ free_first) == 1:
            report = Report(summary, ring, capacity, tag, forward)
            if call_list is not None:
                for item in range(items):
                    tag_calls(
                        slots,
                        calls,
                        marks,
                        size,
                        num_slots,
                        page_size,
                        its_number,
                        item,
                        STRIDE,
                        BLOCK,
                    )
                tl.debug_barrier()
            for item in range(items):
                check_frees(
                    report,
                    slots,
                    calls,
                    marks,
                    k_head,
                    size,
                    num_slots,
                    page_size,
                    its_number,
                    item,
                    SINGLE,
                    STRIDE,
                    BLOCK,
                )
            tl.debug_barrier()
            for item in range(items):
                if SINGLE:
                    mark_listed(
                        slots,
                        k_head,
                        k_tail,
                        v_head,
                        v_tail,
                        size,
                        num_slots,
                        freed,
                        item,
                        FREE,
                        STRIDE,
                        BLOCK,
                    )
                else:
                    mark_pages(
                        slots,
                        k_head,
                        k_tail,
                        v_head,
                        v_tail,
                        size,
                        num_slots,
                        page_size,
                        freed,
                        item,
                        STRIDE,
                        BLOCK,
                    )
        else:
            for item in range(items):
                mark_listed(
                    slots,
                    k_head,
                    k_tail,
                    v_head,
                    v_tail,
                    size,
                    num_slots,
                    freed,
                    item,
                    ALLOC,
                    STRIDE,
                    BLOCK,
                )
        tl.debug_barrier()
