"""Allocator events and moved records: one launch per event for all records of a group."""

from __future__ import annotations

import triton.language as tl

from ....slot_event import SlotEventKind
from ..jit import jit, sum_of
from .record import (
    CHAIN,
    CONTENT,
    DAMAGED,
    FREED,
    FREED_TO_ALLOCATED,
    LIVE,
    NEVER_WRITTEN,
    REASON_DOUBLE_FREE,
    WORDS,
    WRITER,
    pack_writer,
    position_of,
    state_of,
    token_of,
)
from .report import FORWARD_DONE, Report, append_rows

ALLOC = tl.constexpr(int(SlotEventKind.ALLOC))
FREE = tl.constexpr(int(SlotEventKind.FREE))
CLEAR = tl.constexpr(int(SlotEventKind.CLEAR))
UNFILL = tl.constexpr(int(SlotEventKind.UNFILL))


@jit
def _mark(records, slots, usable, word, KIND: tl.constexpr):
    """Apply the event to one record of each slot. Applying it twice changes nothing more."""
    words = records + slots * WORDS
    writer = tl.load(words + WRITER, mask=usable, other=0)
    if KIND == UNFILL:
        tl.store(words + WRITER, word, mask=usable)
        tl.store(words + CONTENT, writer * 0, mask=usable)
    else:
        state = state_of(writer)
        if KIND == ALLOC:
            tl.store(words + WRITER, writer ^ FREED_TO_ALLOCATED, mask=usable & (state == FREED))
        else:
            written = (state == LIVE) | (state == DAMAGED)
            tl.store(words + CONTENT, writer, mask=usable & written)
            freed = (state != NEVER_WRITTEN) & (state != FREED)
            tl.store(words + WRITER, word, mask=usable & freed)


@jit
def _mark_all(k_head, k_tail, v_head, v_tail, slots, usable, word, KIND: tl.constexpr):
    _mark(k_head, slots, usable, word, KIND)
    _mark(k_tail, slots, usable, word, KIND)
    if v_head is not None:
        _mark(v_head, slots, usable, word, KIND)
        _mark(v_tail, slots, usable, word, KIND)


@jit
def _report_double_free(report, k_head, slots, listed, usable, repeated):
    """Report slots that are free already, or `repeated` in this launch. `listed`: what the allocator was given."""
    words = k_head + slots * WORDS
    writer = tl.load(words + WRITER, mask=usable, other=0)
    state = state_of(writer)
    twice = usable & ((state == FREED) | (repeated & (state != NEVER_WRITTEN)))
    if sum_of(twice.to(tl.int32), 0) > 0:
        identity = tl.load(words, mask=usable, other=0)
        append_rows(
            report,
            0,
            tl.where(twice, REASON_DOUBLE_FREE, 0),
            slot=slots,
            full_slot=listed,
            stored_position=position_of(identity),
            stored_token=token_of(identity),
            stored_chain=tl.load(words + CHAIN, mask=usable, other=0),
            writer=writer,
            last_writer=tl.load(words + CONTENT, mask=usable, other=0),
            OUTSIDE=True,
        )


@jit
def _listed(slot_list, size, num_slots, item, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """(slots, usable, listed slots) of a block of the list; of every slot where there is no list."""
    at = item * BLOCK + tl.arange(0, BLOCK)
    if slot_list is None:
        slots = at.to(tl.int64)
        listed = slots
    else:
        listed = tl.load(slot_list + at, mask=at < size, other=0).to(tl.int64)
        slots = listed
        if STRIDE != 1:
            slots = listed // STRIDE
    usable = (slots > 0) & (slots < num_slots)
    return tl.where(usable, slots, 0), usable, listed


@jit
def _listed_before(slot_list, size, item, BLOCK: tl.constexpr):
    """What the list has before each entry of a block; -1 at its start."""
    at = item * BLOCK + tl.arange(0, BLOCK)
    return tl.load(slot_list + at - 1, mask=(at > 0) & (at < size), other=-1).to(tl.int64)


@jit
def _calls(call_list, size, item, BLOCK: tl.constexpr):
    """(number of the call that listed each entry of a block, and of the one that listed the entry before)."""
    at = item * BLOCK + tl.arange(0, BLOCK)
    if call_list is None:
        calls = at * 0
        before = calls
    else:
        calls = tl.load(call_list + at, mask=at < size, other=0)
        before = tl.load(call_list + at - 1, mask=(at > 0) & (at < size), other=-1)
    return calls, before


@jit
def _first_of_page(listed, page_size, STRIDE: tl.constexpr):
    """Slot that begins the page of each listed slot."""
    return listed // page_size * page_size // STRIDE


# The phases of an event, for one block of its list. Each has seen every slot before the next begins.


@jit
def tag_calls(
    slot_list,
    call_list,
    marks,
    size,
    num_slots,
    page_size,
    number,
    item,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark each page with the first call that lists it."""
    _, usable, listed = _listed(slot_list, size, num_slots, item, STRIDE, BLOCK)
    calls, _ = _calls(call_list, size, item, BLOCK)
    mark = marks + _first_of_page(listed, page_size, STRIDE)
    tl.atomic_max(mark, number - calls, mask=usable)


@jit
def check_frees(
    report,
    slot_list,
    call_list,
    marks,
    k_head,
    size,
    num_slots,
    page_size,
    number,
    item,
    SINGLE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Report slots that are free already, or listed before."""
    slots, usable, listed = _listed(slot_list, size, num_slots, item, STRIDE, BLOCK)
    calls, calls_before = _calls(call_list, size, item, BLOCK)
    if STRIDE != 1:
        # The first of a slot's tokens, which are neighbours in the list, speaks for it.
        before = _listed_before(slot_list, size, item, BLOCK)
        usable = usable & ((slots != before // STRIDE) | (calls != calls_before))
    repeated = tl.full([BLOCK], False, tl.int1)
    if SINGLE and STRIDE == 1:
        mine = tl.full([BLOCK], 0, tl.int32) + number
        repeated = tl.atomic_max(marks + slots, mine, mask=usable) == mine
    elif call_list is not None:
        mark = marks + _first_of_page(listed, page_size, STRIDE)
        repeated = tl.load(mark, mask=usable, other=0) > number - calls
    _report_double_free(report, k_head, slots, listed, usable, repeated)


@jit
def mark_listed(
    slot_list,
    k_head,
    k_tail,
    v_head,
    v_tail,
    size,
    num_slots,
    word,
    item,
    KIND: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply the event to the records of the listed slots themselves."""
    slots, usable, _ = _listed(slot_list, size, num_slots, item, STRIDE, BLOCK)
    _mark_all(k_head, k_tail, v_head, v_tail, slots, usable, word, KIND)


@jit
def mark_pages(
    slot_list,
    k_head,
    k_tail,
    v_head,
    v_tail,
    size,
    num_slots,
    page_size,
    word,
    item,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark all slots of the listed slots' pages as freed."""
    _, usable, listed = _listed(slot_list, size, num_slots, item, STRIDE, BLOCK)
    # Neighbours in the list mostly lie in one page: the first of them marks it.
    before = _listed_before(slot_list, size, item, BLOCK)
    page = listed // page_size
    same = (before // STRIDE > 0) & (before // STRIDE < num_slots)
    usable = usable & ~(same & (before // page_size == page))
    first = page * page_size // STRIDE
    for place in range((page_size + (STRIDE - 1)) // STRIDE):
        slot = first + place
        inside = usable & (slot < num_slots)
        _mark_all(k_head, k_tail, v_head, v_tail, slot, inside, word, FREE)


@jit(
    do_not_specialize=[
        "size",
        "num_slots",
        "capacity",
        "tag",
        "page_size",
        "mode",
        "state",
        "number",
    ],
    do_not_specialize_on_alignment=["slot_list", "call_list"],
)
def slot_event_kernel(
    summary,
    ring,
    slot_list,  # None: every slot
    call_list,  # see slots.apply_slot_event
    marks,  # see FreeMarks
    k_head,
    k_tail,
    v_head,  # None: the group has only K
    v_tail,
    size,
    num_slots,
    capacity,
    tag,
    page_size,
    mode,
    state,
    number,  # the highest that this FREE took, its first call's
    KIND: tl.constexpr,
    TAG: tl.constexpr,  # phases of a FREE; several only in a single program
    CHECK: tl.constexpr,
    MARK: tl.constexpr,
    SINGLE: tl.constexpr,  # pages are single slots
    STRIDE: tl.constexpr,  # listed slots per slot
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    forward = tl.load(summary + FORWARD_DONE)
    word = pack_writer(forward, forward * 0, mode.to(tl.int64), state.to(tl.int64))
    items = (size + (BLOCK - 1)) // BLOCK
    if TAG:
        for item in range(program, items, programs):
            tag_calls(
                slot_list, call_list, marks, size, num_slots, page_size, number, item, STRIDE, BLOCK
            )
        tl.debug_barrier()
    if CHECK:
        report = Report(summary, ring, capacity, tag, forward)
        for item in range(program, items, programs):
            check_frees(
                report,
                slot_list,
                call_list,
                marks,
                k_head,
                size,
                num_slots,
                page_size,
                number,
                item,
                SINGLE,
                STRIDE,
                BLOCK,
            )
        tl.debug_barrier()
    if MARK:
        for item in range(program, items, programs):
            if KIND == FREE and not SINGLE:
                mark_pages(
                    slot_list,
                    k_head,
                    k_tail,
                    v_head,
                    v_tail,
                    size,
                    num_slots,
                    page_size,
                    word,
                    item,
                    STRIDE,
                    BLOCK,
                )
            else:
                mark_listed(
                    slot_list,
                    k_head,
                    k_tail,
                    v_head,
                    v_tail,
                    size,
                    num_slots,
                    word,
                    item,
                    KIND,
                    STRIDE,
                    BLOCK,
                )


@jit(
    do_not_specialize=["size", "num_slots"],
    do_not_specialize_on_alignment=["source_list", "target_list"],
)
def copy_kernel(
    source_list,
    target_list,
    k_head,
    k_tail,
    v_head,
    v_tail,
    size,
    num_slots,
    BLOCK: tl.constexpr,  # >= size
):
    """Copy whole records; program i does the i-th buffer, and reads all of it before it writes."""
    records = k_head
    if tl.program_id(0) == 1:
        records = k_tail
    if v_head is not None:
        if tl.program_id(0) == 2:
            records = v_head
        if tl.program_id(0) == 3:
            records = v_tail
    lane = tl.arange(0, BLOCK)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    listed = lane < size
    source = tl.load(source_list + lane, mask=listed, other=0).to(tl.int64)
    target = tl.load(target_list + lane, mask=listed, other=0).to(tl.int64)
    listed = listed & (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots)
    values = tl.load(records + source * WORDS + word, mask=listed, other=0)
    tl.debug_barrier()
    tl.store(records + target * WORDS + word, values, mask=listed)
