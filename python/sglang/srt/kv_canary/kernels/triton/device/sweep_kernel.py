"""Verify of a flat list of slots: HEAD and TAIL records of all halves in one launch."""

from __future__ import annotations

import triton.language as tl

from ..jit import jit, max_of, sum_of
from .check import Lanes, difference, load_words, report_lanes, suspicious
from .record import PREV_UNREACHABLE, REASON_SLOT_OUT_OF_RANGE, UNKNOWN, half_offset
from .report import ARMED, CHECKED, ELIGIBLE, FORWARD_DONE, LAUNCHES, Report, count


@jit
def _entries(slot_list, position_list, prev_list, anchor_list, size, num_slots, at):
    """Lanes of the list's entries `at`."""
    inside = at < size
    listed = tl.load(slot_list + at, mask=inside, other=0)
    positions = tl.load(position_list + at, mask=inside, other=0)
    prev_slots = tl.load(prev_list + at, mask=inside, other=0)
    prev_slots = tl.where(
        (prev_slots == 0) | (prev_slots >= num_slots), PREV_UNREACHABLE, prev_slots
    )
    anchors = positions * 0
    if anchor_list is not None:
        anchors = tl.load(anchor_list + at, mask=inside, other=0)
    outside = (listed < 0) | (listed >= num_slots)
    return Lanes(
        rows=0,
        positions=positions,
        listed=listed != 0,
        full_slots=listed,
        slots=tl.where(outside, 0, listed),
        reasons=tl.where(outside, REASON_SLOT_OUT_OF_RANGE, 0),
        prev_slots=prev_slots,
        anchors=anchors,
        expected_tokens=tl.full(at.shape, UNKNOWN, tl.int64),
    )


@jit
def _differing(records, chain_source, lanes, words):
    """Words that are not 0 in lanes whose records differ from the K HEAD record, all of which fit."""
    chained_to = records if chain_source is None else chain_source
    others = load_words(records, chained_to, lanes.slots, lanes.prev_slots)
    return difference(words, others, lanes.prev_slots)


@jit(do_not_specialize=["size", "num_slots", "capacity", "tag"])
def list_kernel(
    summary,
    ring,
    slot_list,
    position_list,
    prev_list,
    anchor_list,  # None: anchors are 0
    chain_source,
    k_head,
    k_tail,
    v_head,  # None: the group has only K
    v_tail,
    size,
    num_slots,
    capacity,
    tag,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes BLOCK listed slots at a time."""
    forward = tl.load(summary + FORWARD_DONE)
    armed = tl.load(summary + ARMED) != 0
    report = Report(summary, ring, capacity, tag, forward)
    total = tl.full([BLOCK], 0, tl.int32)
    suspects = tl.full([BLOCK], 0, tl.int32)
    items = tl.where(armed, (size + (BLOCK - 1)) // BLOCK, 0)
    lists = (slot_list, position_list, prev_list, anchor_list, size, num_slots)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        lanes = _entries(*lists, item * BLOCK + tl.arange(0, BLOCK))
        chained_to = k_head if chain_source is None else chain_source
        words = load_words(k_head, chained_to, lanes.slots, lanes.prev_slots)
        bad = suspicious(words, lanes, chain_source is not None, STRIDE)
        bad = bad | _differing(k_tail, chain_source, lanes, words)
        if v_head is not None:
            bad = bad | _differing(v_head, chain_source, lanes, words)
            bad = bad | _differing(v_tail, chain_source, lanes, words)
        total += lanes.listed.to(tl.int32)
        suspects |= (lanes.listed & ((bad | lanes.reasons) != 0)).to(tl.int32)
    # In a loop of its own, which nearly never runs: its registers and branches would slow down the other.
    if max_of(suspects, 0) > 0:
        for item in range(tl.program_id(0), items, tl.num_programs(0)):
            lanes = _entries(*lists, item * BLOCK + tl.arange(0, BLOCK))
            for buffer in range(2 if v_head is None else 4):
                offset = tl.where(buffer == 1, half_offset(k_head, k_tail), 0)
                offset = tl.where(buffer == 2, half_offset(k_head, v_head), offset)
                offset = tl.where(buffer == 3, half_offset(k_head, v_tail), offset)
                records = k_head + offset
                report_lanes(
                    report,
                    buffer // 2,
                    records,
                    records if chain_source is None else chain_source,
                    lanes,
                    chain_source is not None,
                    STRIDE,
                    OUTSIDE=True,
                )
    checked = sum_of(total, 0)

    for half in range(1 if v_head is None else 2):
        if checked > 0:
            count(report, half, CHECKED, checked)
            count(report, half, ELIGIBLE, checked)
        if armed & (tl.program_id(0) == 0):
            count(report, half, LAUNCHES, checked * 0 + 1)
