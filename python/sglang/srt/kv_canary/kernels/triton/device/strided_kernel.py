"""HEAD and TAIL launches of strided groups: one slot stands for STRIDE tokens, and has K only.

A slot is read and written by its last token only; `reference.strided` says what its record holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ..jit import jit, sum_of
from .check import Lanes, chain_fold, load_words, report_lanes, suspicious
from .launch import Inputs, Launch, Records
from .overlap import let_next_begin
from .prologue import (
    begin_forward,
    count_verified,
    first_write_of,
    report_bad_requests,
    visited_block,
    visits_of,
)
from .record import (
    CHAIN,
    PREV_ANCHOR,
    PREV_UNREACHABLE,
    REASON_SLOT_OUT_OF_RANGE,
    REASON_WRITE_POSITION,
    UNKNOWN,
    WORDS,
    Space,
    has_stale_weights,
    pack_identity,
    store_record,
    translate,
    writer_word,
)
from .report import WRITTEN, Report, append_rows, count, weights_age_of
from .spans import BATCH_INTEGERS, BATCH_VIEWS, Batch, Table, item_of, request_at, split
from .strided import completed_by, slots_at, strided_slot
from .writes import copy_head


class Base(NamedTuple):
    """The group of stride 1 whose chains the group takes over."""

    records: Any  # HEAD, K
    space: Any


@jit
def _verify_block(launch, weights_age, index, block, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Verify complete slots block * BLOCK .. of request `index`; `weights_age` as in `report_lanes`."""
    batch, space, records = launch.batch, launch.space, launch.records.k
    row = tl.load(batch.rows + index).to(tl.int64)
    prefix = tl.load(batch.base_lens + index).to(tl.int64) + batch.prefix_delta
    number = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    listed = number < prefix // STRIDE
    slot, full, reasons = slots_at(batch, space, row, number, listed)
    prev_slot, _, prev_reasons = slots_at(batch, space, row, number - 1, listed)
    prev_slot = tl.where(prev_reasons == 0, prev_slot, PREV_UNREACHABLE)
    prev_slot = tl.where(number == 0, PREV_ANCHOR, prev_slot)
    lanes = Lanes(
        rows=row,
        positions=number * STRIDE + (STRIDE - 1),
        listed=listed,
        full_slots=full,
        slots=slot,
        reasons=reasons,
        prev_slots=prev_slot,
        anchors=tl.load(launch.anchors + row),
        expected_tokens=tl.full([BLOCK], UNKNOWN, tl.int64),
    )
    words = load_words(records, records, slot, prev_slot)
    bad = suspicious(words, lanes, False, STRIDE)
    if weights_age is not None:
        bad = bad | has_stale_weights(words.writer, launch.report.forward, weights_age)
    bad = listed & ((bad | reasons) != 0)
    if sum_of(bad.to(tl.int32), 0) > 0:
        report_lanes(launch.report, 0, records, records, lanes, False, STRIDE, weights_age)


@jit
def _base_chain(base, inputs, at, lanes):
    """Chain of the base group's record of token `at`; 0 where there is none to read."""
    full = tl.load(inputs.out_cache_loc + at, mask=lanes, other=0).to(tl.int64)
    slot, reasons = translate(base.space, full)
    return tl.load(base.records + slot * WORDS + CHAIN, mask=lanes & (reasons == 0), other=0)


@jit
def _write_block(launch, base, index, block, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Write slots block * BLOCK .. of those that request `index`, which is valid, completes; number written."""
    batch, space, inputs = launch.batch, launch.space, launch.inputs
    records, report = launch.records.k, launch.report
    row = tl.load(batch.rows + index).to(tl.int64)
    number, in_chunk, at, lanes = completed_by(
        batch, inputs.starts, inputs.num_tokens, index, block, STRIDE, BLOCK
    )
    expected_position = number * STRIDE + (STRIDE - 1)
    full = tl.load(inputs.out_cache_loc + at, mask=lanes, other=0).to(tl.int64)
    slot, reasons = strided_slot(space, full)
    keep = lanes & (reasons == 0) & (full % STRIDE == STRIDE - 1)
    position = tl.load(inputs.positions + at, mask=lanes, other=0).to(tl.int64)

    chain = _base_chain(base, inputs, at, lanes)
    in_forward = lanes & (in_chunk >= STRIDE) & (at >= STRIDE)
    prev_slot, _, prev_reasons = slots_at(batch, space, row, number - 1, lanes & (in_forward == 0))
    readable = lanes & (in_forward == 0) & (prev_reasons == 0)
    previous = tl.load(records + prev_slot * WORDS + CHAIN, mask=readable, other=0)
    previous = tl.where(number == 0, tl.load(launch.anchors + row), previous)
    previous = tl.where(in_forward, _base_chain(base, inputs, at - STRIDE, in_forward), previous)
    identity = pack_identity(chain_fold(chain, previous, STRIDE), position)
    store_record(
        records, slot, keep, identity, chain, writer_word(report.forward, row, inputs.mode)
    )

    faults = reasons & REASON_SLOT_OUT_OF_RANGE
    faults = faults | tl.where(position != expected_position, REASON_WRITE_POSITION, 0)
    faults = tl.where(lanes & (full != 0), faults, 0)
    if sum_of((faults != 0).to(tl.int32), 0) > 0:
        append_rows(
            report,
            0,
            faults,
            slot=tl.where((faults & REASON_SLOT_OUT_OF_RANGE) != 0, UNKNOWN, slot),
            full_slot=full,
            expected_position=expected_position,
            stored_position=position,
            reader_row=row,
        )
    return sum_of(keep.to(tl.int32), 0)


STRIDED_INTEGERS = [*BATCH_INTEGERS, "mode", "base_limit", "base_slots", "budget_blocks"]
STRIDED_VIEWS = [*BATCH_VIEWS, "positions"]


@jit(do_not_specialize=STRIDED_INTEGERS, do_not_specialize_on_alignment=STRIDED_VIEWS)
def strided_kernel(
    summary,
    ring,
    anchors,
    rows,
    base_lens,
    ext_lens,
    starts,
    first_slots,  # see forward_kernel
    positions,
    out_cache_loc,
    req_to_token,
    records,
    head,  # TAIL: what HEAD wrote; HEAD: None
    base_records,
    base_lut,
    prefix_delta,
    batch_size,
    num_tokens,
    tokens_per_request,
    mode,
    row_stride,
    num_rows,
    context,
    full_limit,
    num_slots,
    base_limit,
    base_slots,
    window,  # 0: an earlier forward of the step has verified everything
    budget_blocks,
    capacity,
    tag,
    STRIDE: tl.constexpr,
    BATCH: tl.constexpr,  # power of two >= batch_size
    BLOCK: tl.constexpr,  # slots per verify or HEAD write item, tokens per TAIL write item
    VERIFY: tl.constexpr,
    WRITE: tl.constexpr,
    NUMBER: tl.constexpr,
    NEXT_MAY_BEGIN: tl.constexpr,
):
    """Programs take the visited blocks, then the writes, round robin."""
    HEAD: tl.constexpr = head is None
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    let_next_begin(NEXT_MAY_BEGIN)
    forward, armed = begin_forward(summary, HEAD, NUMBER)

    batch = Batch(
        Table(req_to_token, row_stride, num_rows, context),
        rows,
        base_lens,
        ext_lens,
        prefix_delta,
        tokens_per_request,
        batch_size,
        window,
        first_slots,
    )
    launch = Launch(
        batch,
        Space(None, full_limit, num_slots, STRIDE),
        Inputs(positions, out_cache_loc, starts, num_tokens, mode),
        Records(records, None, None),
        anchors,
        Report(summary, ring, capacity, tag, forward),
    )
    base = Base(base_records, Space(base_lut, base_limit, base_slots, 1))

    request = tl.arange(0, BATCH)
    row, prefix, new, valid = request_at(batch, request)
    complete = tl.where(valid & (window > 0), prefix // STRIDE, 0).to(tl.int32)
    visits = visits_of(complete, request, budget_blocks, forward, armed, VERIFY, BLOCK)
    if HEAD:
        completed = tl.where(valid, (prefix + new) // STRIDE - prefix // STRIDE, 0).to(tl.int32)
        write_blocks = (completed + (BLOCK - 1)) // BLOCK
        first_writes, writes = split(write_blocks)
    else:
        writes = (num_tokens + (BLOCK - 1)) // BLOCK
    writes = tl.where(armed, writes, 0)

    # The last program has the fewest items.
    if armed & (program == programs - 1):
        if VERIFY:
            count_verified(launch.report, visits, prefix * 0, 1, BLOCK)
        if HEAD and WRITE:
            report_bad_requests(launch, row, prefix, valid, request, request < 0, 1)

    written = tl.full([], 0, tl.int32)
    if VERIFY:
        weights_age = None
        if HEAD:  # TAIL reads the same slots
            weights_age = weights_age_of(summary, forward)
        for item in range(program, visits.number, programs):
            index, number, first = visited_block(visits, item)
            _verify_block(launch, weights_age, index, number - first, STRIDE, BLOCK)
    if WRITE:
        for item in range(first_write_of(visits), writes, programs):
            if HEAD:
                index, first = item_of(item, first_writes, write_blocks, request)
                written += _write_block(launch, base, index, item - first, STRIDE, BLOCK)
            else:
                token = item * BLOCK + tl.arange(0, BLOCK)
                full = tl.load(out_cache_loc + token, mask=token < num_tokens, other=0).to(tl.int64)
                slot, reasons = strided_slot(launch.space, full)
                completes = (reasons == 0) & (full % STRIDE == STRIDE - 1)
                copied, _ = copy_head(head, None, records, None, slot, completes, forward)
                written += copied
    if written > 0:
        count(launch.report, 0, WRITTEN, written)
