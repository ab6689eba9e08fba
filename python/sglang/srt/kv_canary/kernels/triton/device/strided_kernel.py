"""HEAD and TAIL launches of strided groups: one slot stands for STRIDE tokens, and has K only.

A slot is read and written by its last token only; `reference.strided` says what its record holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ..jit import jit, sum_of
from .check import chain_fold, load_words, report_lanes, suspicious
from .forward_kernel import count_verified, report_bad_requests
from .record import (
    ARMED,
    BAD_SLOT,
    BAD_WRITE_POSITION,
    CHAIN,
    FORWARD_DONE,
    FORWARD_RUNNING,
    PREV_ANCHOR,
    PREV_UNREACHABLE,
    UNKNOWN,
    WORDS,
    WRITTEN,
    Report,
    Space,
    append_rows,
    count,
    has_stale_weights,
    pack_identity,
    store_record,
    translate,
    weights_age_of,
    writer_word,
)
from .spans import Batch, item_of, request_at, split, turn_of
from .strided import completed_by, slots_at, strided_slot
from .writes import copy_head


class Base(NamedTuple):
    """The group of stride 1 whose chains the group takes over."""

    records: Any  # HEAD, K
    space: Any


class Tokens(NamedTuple):
    """The forward's new tokens, as WritePlan has them."""

    positions: Any
    out_cache_loc: Any
    starts: Any
    number: Any
    mode: Any


@jit
def _verify_block(
    batch,
    space,
    report,
    weights_age,  # None: stale weights are not reported
    anchors,
    records,
    index,
    block,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Verify complete slots block * BLOCK .. of request `index`."""
    row = tl.load(batch.rows + index).to(tl.int64)
    prefix = tl.load(batch.base_lens + index).to(tl.int64) + batch.prefix_delta
    number = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    lanes = number < prefix // STRIDE
    slot, full, reasons = slots_at(batch, space, row, number, lanes)
    prev_slot, _, prev_reasons = slots_at(batch, space, row, number - 1, lanes)
    prev_slot = tl.where(prev_reasons == 0, prev_slot, PREV_UNREACHABLE)
    prev_slot = tl.where(number == 0, PREV_ANCHOR, prev_slot)
    position = number * STRIDE + (STRIDE - 1)
    anchor = tl.load(anchors + row)
    unknown = tl.full([BLOCK], UNKNOWN, tl.int64)
    words = load_words(records, records, slot, prev_slot)
    bad = suspicious(words, prev_slot, position, anchor, unknown, False, STRIDE)
    if weights_age is not None:
        bad = bad | has_stale_weights(words.writer, report.forward, weights_age)
    bad = lanes & ((bad | reasons) != 0)
    if sum_of(bad.to(tl.int32), 0) > 0:
        report_lanes(
            report,
            0,
            records,
            records,
            lanes,
            slot,
            full,
            prev_slot,
            position,
            anchor,
            unknown,
            row,
            reasons,
            False,
            STRIDE,
            weights_age,
        )


@jit
def _base_chain(base, tokens, at, lanes):
    """Chain of the base group's record of token `at`; 0 where there is none to read."""
    full = tl.load(tokens.out_cache_loc + at, mask=lanes, other=0).to(tl.int64)
    slot, reasons = translate(base.space, full)
    return tl.load(base.records + slot * WORDS + CHAIN, mask=lanes & (reasons == 0), other=0)


@jit
def _write_block(
    batch,
    space,
    base,
    tokens,
    report,
    anchors,
    records,
    index,
    block,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write slots block * BLOCK .. of those that request `index`, which is valid, completes; number written."""
    row = tl.load(batch.rows + index).to(tl.int64)
    number, in_chunk, at, lanes = completed_by(
        batch, tokens.starts, tokens.number, index, block, STRIDE, BLOCK
    )
    expected_position = number * STRIDE + (STRIDE - 1)
    full = tl.load(tokens.out_cache_loc + at, mask=lanes, other=0).to(tl.int64)
    slot, reasons = strided_slot(space, full)
    keep = lanes & (reasons == 0) & (full % STRIDE == STRIDE - 1)
    position = tl.load(tokens.positions + at, mask=lanes, other=0).to(tl.int64)

    chain = _base_chain(base, tokens, at, lanes)
    in_forward = lanes & (in_chunk >= STRIDE) & (at >= STRIDE)
    prev_slot, _, prev_reasons = slots_at(batch, space, row, number - 1, lanes & (in_forward == 0))
    readable = lanes & (in_forward == 0) & (prev_reasons == 0)
    previous = tl.load(records + prev_slot * WORDS + CHAIN, mask=readable, other=0)
    previous = tl.where(number == 0, tl.load(anchors + row), previous)
    previous = tl.where(in_forward, _base_chain(base, tokens, at - STRIDE, in_forward), previous)
    identity = pack_identity(chain_fold(chain, previous, STRIDE), position)
    store_record(
        records, slot, keep, identity, chain, writer_word(report.forward, row, tokens.mode)
    )

    faults = reasons & BAD_SLOT
    faults = faults | tl.where(position != expected_position, BAD_WRITE_POSITION, 0)
    faults = tl.where(lanes & (full != 0), faults, 0)
    if sum_of((faults != 0).to(tl.int32), 0) > 0:
        append_rows(
            report,
            0,
            faults,
            tl.where((faults & BAD_SLOT) != 0, UNKNOWN, slot),
            full,
            UNKNOWN,
            expected_position,
            position,
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            row,
            0,
            0,
        )
    return sum_of(keep.to(tl.int32), 0)


STRIDED_INTEGERS = [
    "prefix_delta",
    "batch_size",
    "num_tokens",
    "tokens_per_request",
    "mode",
    "row_stride",
    "num_rows",
    "context",
    "full_limit",
    "num_slots",
    "base_limit",
    "base_slots",
    "window",
    "budget_blocks",
    "capacity",
    "tag",
]
STRIDED_VIEWS = [
    "rows",
    "base_lens",
    "ext_lens",
    "starts",
    "first_slots",
    "positions",
    "out_cache_loc",
]


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
):
    """Programs take the visited blocks, then the writes, round robin."""
    HEAD: tl.constexpr = head is None
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    GIVES_OUT: tl.constexpr = HEAD and NUMBER
    forward = tl.load(summary + (FORWARD_DONE if GIVES_OUT else FORWARD_RUNNING))
    if GIVES_OUT:
        forward += 1
    armed = tl.load(summary + ARMED) != 0
    # The word that no program of this launch reads.
    if NUMBER and program == 0:
        if HEAD:
            tl.store(summary + FORWARD_RUNNING, forward)
        else:
            tl.store(summary + FORWARD_DONE, forward)

    batch = Batch(
        rows,
        base_lens,
        ext_lens,
        prefix_delta,
        tokens_per_request,
        batch_size,
        req_to_token,
        row_stride,
        num_rows,
        context,
        window,
        first_slots,
    )
    space = Space(None, full_limit, num_slots, STRIDE)
    base = Base(base_records, Space(base_lut, base_limit, base_slots, 1))
    report = Report(summary, ring, capacity, tag, forward)
    tokens = Tokens(positions, out_cache_loc, starts, num_tokens, mode)

    request = tl.arange(0, BATCH)
    row, prefix, new, valid = request_at(batch, request)
    complete = tl.where(valid & (window > 0), prefix // STRIDE, 0).to(tl.int32)
    blocks = (complete + (BLOCK - 1)) // BLOCK
    first_blocks, total_blocks = split(blocks)
    every = tl.maximum((total_blocks + budget_blocks - 1) // budget_blocks, 1)
    phase = turn_of(forward, every)
    visits = total_blocks * 0
    if VERIFY:
        visits = tl.maximum(total_blocks - phase + every - 1, 0) // every
    if HEAD:
        completed = tl.where(valid, (prefix + new) // STRIDE - prefix // STRIDE, 0).to(tl.int32)
        write_blocks = (completed + (BLOCK - 1)) // BLOCK
        first_writes, writes = split(write_blocks)
    else:
        writes = (num_tokens + (BLOCK - 1)) // BLOCK
    visits = tl.where(armed, visits, 0)
    writes = tl.where(armed, writes, 0)

    # The last program has the fewest items.
    if armed & (program == programs - 1):
        if VERIFY:
            outside = prefix * 0
            count_verified(report, complete, blocks, first_blocks, outside, every, phase, 1, BLOCK)
        if HEAD and WRITE:
            report_bad_requests(batch, report, row, prefix, valid, request, request < 0, 1)

    written = tl.full([], 0, tl.int32)
    if VERIFY:
        weights_age = None
        if HEAD:  # TAIL reads the same slots
            weights_age = weights_age_of(summary, forward)
        for item in range(program, visits, programs):
            block = phase + item * every
            index, first = item_of(block, first_blocks, blocks, request)
            _verify_block(
                batch,
                space,
                report,
                weights_age,
                anchors,
                records,
                index,
                block - first,
                STRIDE,
                BLOCK,
            )
    if WRITE:
        first_write = (program + programs - visits % programs) % programs
        for item in range(first_write, writes, programs):
            if HEAD:
                index, first = item_of(item, first_writes, write_blocks, request)
                written += _write_block(
                    batch,
                    space,
                    base,
                    tokens,
                    report,
                    anchors,
                    records,
                    index,
                    item - first,
                    STRIDE,
                    BLOCK,
                )
            else:
                token = item * BLOCK + tl.arange(0, BLOCK)
                full = tl.load(out_cache_loc + token, mask=token < num_tokens, other=0).to(tl.int64)
                slot, reasons = strided_slot(space, full)
                completes = (reasons == 0) & (full % STRIDE == STRIDE - 1)
                copied, _ = copy_head(head, None, records, None, slot, completes, forward)
                written += copied
    if written > 0:
        count(report, 0, WRITTEN, written)
