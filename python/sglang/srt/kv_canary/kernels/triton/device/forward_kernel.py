"""One launch per group and side of a forward: verify the prefixes, write the new tokens' records, K and V."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ..jit import jit, max_of, sum_of
from .check import difference, load_words, report_lanes, suspicious
from .record import (
    ARMED,
    BAD_LENGTH,
    BAD_ROW,
    CHECKED,
    COUNTERS,
    ELIGIBLE,
    FIRST_COUNTER,
    FORWARD_DONE,
    FORWARD_RUNNING,
    IDX_DIVERGENCE,
    LAUNCHES,
    MULTIPLIER,
    MULTIPLIER_INVERSE,
    OUT_OF_WINDOW,
    PREV_ANCHOR,
    PREV_UNREACHABLE,
    TAG_V,
    UNKNOWN,
    WRITTEN,
    Report,
    Space,
    append_rows,
    count,
    half_offset,
    has_stale_weights,
    translate,
    weights_age_of,
)
from .rows import Rows
from .spans import Batch, Known, item_of, known_token, request_at, split, turn_of
from .writes import Inputs, copy_head, flat_tokens, lane_powers, write_flat, write_tile


class _Block(NamedTuple):
    """A verify work item: slots of a request's prefix, one per lane. Slots and positions are int32."""

    row: Any  # int64
    position: Any
    lanes: Any  # those that hold a slot
    full: Any
    slot: Any
    reasons: Any
    prev_slot: Any
    anchor: Any
    expected: Any


class _Turn(NamedTuple):
    """Which blocks are visited, and all that it takes to find their slots."""

    batch: Any
    space: Any
    known: Any
    anchors: Any
    first_blocks: Any
    blocks: Any
    requests: Any
    phase: Any
    every: Any


@jit
def _block_at(turn, item, BLOCK: tl.constexpr):
    """The slots of the `item`-th block that is visited."""
    batch, space = turn.batch, turn.space
    number = turn.phase + item * turn.every
    index, first = item_of(number, turn.first_blocks, turn.blocks, turn.requests)
    row = tl.load(batch.rows + index).to(tl.int64)
    # Visited requests are valid: their lengths fit, and slots that fit the pool do.
    prefix = (tl.load(batch.base_lens + index) + batch.prefix_delta).to(tl.int32)
    start = tl.maximum(prefix - batch.window, 0)
    lane = tl.arange(0, BLOCK)
    position = start + (number - first) * BLOCK + lane
    lanes = position < prefix
    has_prev = lanes & (position > start)
    tokens = batch.req_to_token + row * batch.row_stride
    # Not masked: predicates are few, and a compiler that runs out of them puts misses behind each other.
    at = tl.minimum(position, prefix - 1)
    full = tl.load(tokens + at)
    prev_full = tl.load(tokens + tl.maximum(at - 1, 0))
    anchor = tl.load(turn.anchors + row)
    slot, reasons = translate(space, full)
    prev_slot, prev_reasons = translate(space, prev_full)
    slot, prev_slot = slot.to(tl.int32), prev_slot.to(tl.int32)
    prev_slot = tl.where(has_prev & (prev_reasons == 0), prev_slot, PREV_UNREACHABLE)
    prev_slot = tl.where(position == 0, PREV_ANCHOR, prev_slot)
    expected = known_token(turn.known, index + lane * 0, position, lanes)
    return _Block(row, position, lanes, full, slot, reasons, prev_slot, anchor, expected)


@jit
def _load_block(item, chain_source, k_records, v_records):
    """Words of block `item`: K's, and V's (K's again where there is no V)."""
    chained_to = k_records if chain_source is None else chain_source
    words = load_words(k_records, chained_to, item.slot, item.prev_slot)
    v_words = words
    if v_records is not None:
        v_chained_to = v_records if chain_source is None else chain_source
        v_words = load_words(v_records, v_chained_to, item.slot, _v_prev_slot(item))
    return words, v_words


@jit
def _v_prev_slot(item):
    """A lane's predecessor is the lane before it, so only lane 0's is left to compare with V's."""
    first = tl.arange(0, item.slot.shape[0]) == 0
    return tl.where(first, item.prev_slot, PREV_UNREACHABLE)


@jit
def _suspects(item, words, v_words, forward, weights_age, UNFILLS: tl.constexpr):
    """Lanes of block `item` that may be bad, as int32."""
    bad = suspicious(words, item.prev_slot, item.position, item.anchor, item.expected, UNFILLS)
    bad = bad | difference(words, v_words, _v_prev_slot(item))
    if weights_age is not None:
        bad = bad | has_stale_weights(words.writer, forward, weights_age)
    return (item.lanes & ((bad | item.reasons) != 0)).to(tl.int32)


@jit
def _elsewhere(item):
    """Lanes whose slot has another index than its full slot, as int32."""
    return (item.lanes & (item.reasons == 0) & (item.slot != item.full)).to(tl.int32)


@jit
def _report_block(item, report, weights_age, chain_source, k_records, v_records):
    """Check block `item` lane by lane and report what fails."""
    offset = half_offset(k_records, v_records)
    for half in range(1 if v_records is None else 2):
        records = k_records + half * offset
        chained_to = records if chain_source is None else chain_source
        report_lanes(
            report,
            half,
            records,
            chained_to,
            item.lanes,
            item.slot.to(tl.int64),
            item.full.to(tl.int64),
            item.prev_slot.to(tl.int64),
            item.position.to(tl.int64),
            item.anchor,
            item.expected,
            item.row,
            item.reasons,
            chain_source is not None,
            1,
            weights_age,
        )


@jit
def _verify(
    turn,
    report,
    weights_age,  # None: stale weights are not reported
    chain_source,
    k_records,
    v_records,
    program,
    programs,
    visits,
    BLOCK: tl.constexpr,
):
    """Verify every `programs`-th visited block from `program` on; slots whose index differs from the full one."""
    forward = report.forward
    UNFILLS: tl.constexpr = chain_source is not None
    elsewhere = tl.full([BLOCK], 0, tl.int32)
    suspects = tl.full([BLOCK], 0, tl.int32)
    if program < visits:
        # Words are loaded a turn before they are checked, slots a turn before that: no load waits for another.
        block = _block_at(turn, program, BLOCK)
        words, v_words = _load_block(block, chain_source, k_records, v_records)
        more = block
        if program + programs < visits:
            more = _block_at(turn, program + programs, BLOCK)
        for item in range(program + programs, visits, programs):
            more_words, more_v_words = _load_block(more, chain_source, k_records, v_records)
            further = _block_at(turn, tl.minimum(item + programs, visits - 1), BLOCK)
            suspects |= _suspects(block, words, v_words, forward, weights_age, UNFILLS)
            elsewhere += _elsewhere(block)
            block, words, v_words, more = more, more_words, more_v_words, further
        suspects |= _suspects(block, words, v_words, forward, weights_age, UNFILLS)
        elsewhere += _elsewhere(block)
    # In a loop of its own, which nearly never runs: its registers and branches would slow down the other.
    if max_of(suspects, 0) > 0:
        for item in range(program, visits, programs):
            block = _block_at(turn, item, BLOCK)
            _report_block(block, report, weights_age, chain_source, k_records, v_records)
    diverged = tl.full([], 0, tl.int32)
    if turn.space.lut is not None:
        diverged = sum_of(elsewhere, 0)
    return diverged


@jit
def whole_requests(tokens_per_request, BLOCK: tl.constexpr):
    """Tokens of a block that holds whole requests: a request's row memory is read and stored by one program."""
    each = tl.maximum(tokens_per_request, 1)
    return tl.where(each <= BLOCK, BLOCK // each * each, BLOCK)


@jit
def padding_with_slots(batch, row, request, out_cache_loc):
    """Requests of a uniform batch that have the padding row 0 and yet a slot for their first new token."""
    padding = (row == 0) & (request < batch.size)
    at = request * batch.tokens_per_request
    full = tl.load(out_cache_loc + at, mask=padding & (batch.tokens_per_request > 0), other=0)
    return padding & (full != 0)


@jit
def report_bad_requests(
    batch, report, row, prefix, valid, request, misplaced, halves: tl.constexpr
):
    """`misplaced`: requests whose row is known to be another's."""
    bad_row = (row < 0) | (row >= batch.num_rows) | misplaced
    bad_length = (row != 0) & (valid == 0) & (bad_row == 0)
    reasons = tl.where(bad_row, BAD_ROW, tl.where(bad_length, BAD_LENGTH, 0))
    reasons = tl.where(request < batch.size, reasons, 0)
    if sum_of((reasons != 0).to(tl.int32), 0) > 0:
        for half in range(halves):
            append_rows(
                report,
                half,
                reasons,
                UNKNOWN,
                UNKNOWN,
                UNKNOWN,
                prefix,
                UNKNOWN,
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


@jit
def count_verified(
    report,
    eligible,
    blocks,
    first_blocks,
    outside,
    every,
    phase,
    halves: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the launch, and what all programs check together: full blocks visited, less what short last blocks lack.

    A launch that only writes does not count: a lost one shows in the forward counter (that of further scratch
    nowhere, and nobody reads scratch), a lost check nowhere else.
    """
    ends = first_blocks + blocks
    visited = (ends - 1 - phase + every) // every - (first_blocks - 1 - phase + every) // every
    last_visited = (blocks > 0) & (((ends - 1) % every) == phase)
    checked = visited * BLOCK - tl.where(last_visited, blocks * BLOCK - eligible, 0)
    counter = tl.arange(0, COUNTERS)
    amounts = (counter == LAUNCHES).to(tl.int64)
    amounts = tl.where(counter == CHECKED, sum_of(checked.to(tl.int64), 0), amounts)
    amounts = tl.where(counter == ELIGIBLE, sum_of(eligible.to(tl.int64), 0), amounts)
    amounts = tl.where(counter == OUT_OF_WINDOW, sum_of(outside, 0), amounts)
    for half in range(halves):
        mine = report.summary + FIRST_COUNTER + (report.tag + half * TAG_V) * COUNTERS
        tl.atomic_add(mine + counter, amounts, mask=amounts != 0, sem="relaxed")


# Specialising on these values would compile the kernel again in the middle of serving.
HOST_INTEGERS = [
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
    "window",
    "budget_blocks",
    "capacity",
    "tag",
    "num_spans",
    "num_known",
    "token_offset",
    "row_growth",
]
BATCH_VIEWS = [
    "rows",
    "base_lens",
    "ext_lens",
    "starts",
    "first_slots",
    "input_ids",
    "positions",
    "out_cache_loc",
    "swa_out_cache_loc",
    "parents",
    "known_tokens",
]


@jit(do_not_specialize=HOST_INTEGERS, do_not_specialize_on_alignment=BATCH_VIEWS)
def forward_kernel(
    summary,
    ring,
    anchors,
    chain_source,  # None: chains step from the records themselves
    rows,
    base_lens,
    ext_lens,
    starts,
    first_slots,  # out_cache_loc, where a request whose first slot is 0 is padding, else None
    parents,
    input_ids,
    positions,
    out_cache_loc,
    swa_out_cache_loc,  # where attention stores the tokens; None: not to be compared
    req_to_token,
    lut,
    k_records,
    v_records,  # None: the group has only K
    k_head,  # TAIL: what HEAD wrote; HEAD: None
    v_head,
    known_tokens,
    known_spans,
    row_words,  # None: the group keeps no row memory
    sampled,
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
    window,
    budget_blocks,
    capacity,
    tag,
    num_spans,
    num_known,
    token_offset,
    row_growth,
    BATCH: tl.constexpr,  # power of two >= batch_size
    BLOCK: tl.constexpr,  # slots per verify item
    WRITE_BLOCK: tl.constexpr,  # tokens per write item of decode and of TAIL
    TILE_BITS: tl.constexpr,  # log2 of the tokens per chunk write item; 0: a lane per token
    SINGLE: tl.constexpr,  # one token per request
    VERIFY: tl.constexpr,
    WRITE: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """Programs take the visited blocks, then the writes, round robin."""
    HEAD: tl.constexpr = k_head is None
    halves: tl.constexpr = 1 if v_records is None else 2
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
    space = Space(lut, full_limit, num_slots, 1)
    known = Known(known_tokens, known_spans, num_spans, num_known, token_offset)
    report = Report(summary, ring, capacity, tag, forward)
    inputs = Inputs(
        input_ids, positions, out_cache_loc, swa_out_cache_loc, starts, parents, num_tokens, mode
    )

    row_memory = Rows(row_words, sampled, row_growth)

    request = tl.arange(0, BATCH)
    row, prefix, new, valid = request_at(batch, request)
    window_start = tl.maximum(prefix - window, 0)
    eligible = tl.where(valid, prefix - window_start, 0).to(tl.int32)
    blocks = (eligible + (BLOCK - 1)) // BLOCK
    first_blocks, total_blocks = split(blocks)
    every = tl.maximum((total_blocks + budget_blocks - 1) // budget_blocks, 1)
    phase = turn_of(forward, every)
    visits = total_blocks * 0
    if VERIFY:
        visits = tl.maximum(total_blocks - phase + every - 1, 0) // every
    if TILE_BITS == 0:
        per_block = num_tokens * 0 + WRITE_BLOCK
        if HEAD and not SINGLE:
            per_block = whole_requests(tokens_per_request, WRITE_BLOCK)
        writes = (num_tokens + (per_block - 1)) // per_block
    else:
        tiles = tl.where(valid, (new.to(tl.int32) + (2**TILE_BITS - 1)) // 2**TILE_BITS, 0)
        first_tiles, writes = split(tiles)
        powers, tile_power = lane_powers(MULTIPLIER, TILE_BITS)
        inverse_powers, _ = lane_powers(MULTIPLIER_INVERSE, TILE_BITS)
    visits = tl.where(armed, visits, 0)
    writes = tl.where(armed, writes, 0)

    # The last program has the fewest items.
    if armed & (program == programs - 1):
        if VERIFY:
            # Window 0 says that an earlier forward of the step has verified everything.
            outside = tl.where(valid & (window > 0), window_start, 0)
            count_verified(
                report, eligible, blocks, first_blocks, outside, every, phase, halves, BLOCK
            )
        if HEAD and WRITE:
            misplaced = request < 0
            if row_words is not None and ext_lens is None:
                misplaced = padding_with_slots(batch, row, request, out_cache_loc)
            report_bad_requests(batch, report, row, prefix, valid, request, misplaced, halves)

    diverged = tl.full([], 0, tl.int32)
    written = tl.full([], 0, tl.int32)
    v_written = tl.full([], 0, tl.int32)
    if VERIFY:
        turn = _Turn(batch, space, known, anchors, first_blocks, blocks, request, phase, every)
        weights_age = None
        if HEAD:  # TAIL reads the same slots
            weights_age = weights_age_of(summary, forward)
        diverged = _verify(
            turn,
            report,
            weights_age,
            chain_source,
            k_records,
            v_records,
            program,
            programs,
            visits,
            BLOCK,
        )
    if WRITE:
        first_write = (program + programs - visits % programs) % programs
        lane = tl.arange(0, WRITE_BLOCK)
        if not HEAD:
            for item in range(first_write, writes, programs):
                token = item * WRITE_BLOCK + lane
                full = tl.load(out_cache_loc + tl.minimum(token, num_tokens - 1)).to(tl.int64)
                slot, reasons = translate(space, tl.where(token < num_tokens, full, 0))
                copied, v_copied = copy_head(
                    k_head, v_head, k_records, v_records, slot, reasons == 0, forward
                )
                written += copied
                v_written += v_copied
        elif TILE_BITS == 0:
            # Loaded a turn ahead, else ptxas puts these loads behind those of the records before.
            beyond = tl.where(lane < per_block, 0, num_tokens)
            index = first_write * per_block + lane + beyond
            tokens = flat_tokens(batch, inputs, anchors, row_memory, known, index, SINGLE)
            for item in range(first_write, writes, programs):
                following = (item + programs) * per_block + lane + beyond
                more = flat_tokens(batch, inputs, anchors, row_memory, known, following, SINGLE)
                written += write_flat(
                    batch,
                    inputs,
                    space,
                    known,
                    report,
                    row_memory,
                    tokens,
                    chain_source,
                    k_records,
                    v_records,
                    SINGLE,
                )
                tokens = more
        else:
            for item in range(first_write, writes, programs):
                index, first = item_of(item, first_tiles, tiles, request)
                written += write_tile(
                    batch,
                    inputs,
                    space,
                    known,
                    report,
                    row_memory,
                    anchors,
                    chain_source,
                    k_records,
                    v_records,
                    powers,
                    inverse_powers,
                    tile_power,
                    index,
                    item - first,
                    2**TILE_BITS,
                )

    if HEAD and halves == 2:
        v_written = written
    if written > 0:
        count(report, 0, WRITTEN, written)
    if v_written > 0:
        count(report, 1, WRITTEN, v_written)
    if diverged > 0:
        for half in range(halves):
            count(report, half, IDX_DIVERGENCE, diverged)
