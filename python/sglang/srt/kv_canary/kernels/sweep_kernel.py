"""Verify of a flat list of slots: HEAD and TAIL records of all halves in one launch."""

from __future__ import annotations

import triton.language as tl

from sglang.srt.kv_canary.kernels.device_check import report_lanes, suspicious
from sglang.srt.kv_canary.kernels.device_record import (
    ARMED,
    BAD_SLOT,
    CHAIN,
    CHECKED,
    ELIGIBLE,
    FORWARD_DONE,
    LAUNCHES,
    PREV_UNREACHABLE,
    UNKNOWN,
    WORDS,
    WRITER,
    Report,
    count,
    half_offset,
)
from sglang.srt.kv_canary.kernels.jit import jit, sum_of


@jit
def _differ(records, chain_source, slots, prev_slots, identity, chain, writer, previous):
    """Lanes whose words differ from those of the K HEAD record, all of which fit."""
    words = records + slots * WORDS
    bad = (tl.load(words) != identity) | (tl.load(words + CHAIN) != chain)
    bad = bad | (tl.load(words + WRITER) != writer)
    if chain_source is None:
        has_prev = prev_slots >= 0
        own = tl.load(records + prev_slots * WORDS + CHAIN, mask=has_prev, other=0)
        bad = bad | (has_prev & (own != previous))
    return bad


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
    unknown = tl.full([BLOCK], UNKNOWN, tl.int64)
    total = tl.full([], 0, tl.int32)
    items = tl.where(armed, (size + (BLOCK - 1)) // BLOCK, 0)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        at = item * BLOCK + tl.arange(0, BLOCK)
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
        lanes = listed != 0
        outside = (listed < 0) | (listed >= num_slots)
        slots = tl.where(outside, 0, listed)
        reasons = tl.where(outside, BAD_SLOT, 0)
        total += sum_of(lanes.to(tl.int32), 0)

        bad, identity, chain, writer, previous = suspicious(
            k_head,
            k_head if chain_source is None else chain_source,
            slots,
            prev_slots,
            positions,
            anchors,
            unknown,
            STRIDE,
        )
        bad = bad | _differ(
            k_tail, chain_source, slots, prev_slots, identity, chain, writer, previous
        )
        if v_head is not None:
            bad = bad | _differ(
                v_head, chain_source, slots, prev_slots, identity, chain, writer, previous
            )
            bad = bad | _differ(
                v_tail, chain_source, slots, prev_slots, identity, chain, writer, previous
            )
        bad = lanes & (bad | outside)
        if sum_of(bad.to(tl.int32), 0) > 0:
            for buffer in range(2 if v_head is None else 4):
                offset = tl.where(buffer == 1, half_offset(k_head, k_tail), 0)
                offset = tl.where(buffer == 2, half_offset(k_head, v_head), offset)
                offset = tl.where(buffer == 3, half_offset(k_head, v_tail), offset)
                report_lanes(
                    report,
                    buffer // 2,
                    k_head + offset,
                    k_head + offset if chain_source is None else chain_source,
                    lanes,
                    slots,
                    listed,
                    prev_slots,
                    positions,
                    anchors,
                    unknown,
                    0,
                    reasons,
                    STRIDE,
                )

    for half in range(1 if v_head is None else 2):
        if total > 0:
            count(report, half, CHECKED, total)
            count(report, half, ELIGIBLE, total)
        if armed & (tl.program_id(0) == 0):
            count(report, half, LAUNCHES, total * 0 + 1)
