"""One launch per group and side of a forward: verify the prefixes, write the new tokens' records, K and V."""

from __future__ import annotations

import triton.language as tl

from ..jit import jit
from .flat_writes import flat_tokens, whole_requests, write_flat
from .launch import Inputs, Launch, Records
from .overlap import let_next_begin
from .prologue import (
    begin_forward,
    count_verified,
    first_write_of,
    padding_with_slots,
    report_bad_requests,
    visits_of,
)
from .record import Space, translate
from .report import IDX_DIVERGENCE, WRITTEN, Report, count, weights_age_of
from .rows import Rows
from .spans import BATCH_INTEGERS, BATCH_VIEWS, Batch, Known, Table, item_of, request_at, split
from .tile_writes import powers_of, write_tile
from .verify import verify
from .writes import copy_head

FORWARD_INTEGERS = [
    *BATCH_INTEGERS,
    "mode",
    "budget_blocks",
    "num_spans",
    "num_known",
    "token_offset",
    "row_growth",
]
FORWARD_VIEWS = [
    *BATCH_VIEWS,
    "input_ids",
    "positions",
    "swa_out_cache_loc",
    "parents",
    "known_tokens",
]


@jit(do_not_specialize=FORWARD_INTEGERS, do_not_specialize_on_alignment=FORWARD_VIEWS)
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
    NEXT_MAY_BEGIN: tl.constexpr,
):
    """Programs take the visited blocks, then the writes, round robin."""
    HEAD: tl.constexpr = k_head is None
    halves: tl.constexpr = 1 if v_records is None else 2
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
    inputs = Inputs(
        positions,
        out_cache_loc,
        starts,
        num_tokens,
        mode,
        input_ids,
        swa_out_cache_loc,
        parents,
    )
    launch = Launch(
        batch,
        Space(lut, full_limit, num_slots, 1),
        inputs,
        Records(k_records, v_records, chain_source),
        anchors,
        Report(summary, ring, capacity, tag, forward),
        Known(known_tokens, known_spans, num_spans, num_known, token_offset),
        Rows(row_words, sampled, row_growth),
    )

    request = tl.arange(0, BATCH)
    row, prefix, new, valid = request_at(batch, request)
    window_start = tl.maximum(prefix - window, 0)
    eligible = tl.where(valid, prefix - window_start, 0).to(tl.int32)
    visits = visits_of(eligible, request, budget_blocks, forward, armed, VERIFY, BLOCK)
    if TILE_BITS == 0:
        per_block = num_tokens * 0 + WRITE_BLOCK
        if HEAD and not SINGLE:
            per_block = whole_requests(tokens_per_request, WRITE_BLOCK)
        writes = (num_tokens + (per_block - 1)) // per_block
    else:
        tiles = tl.where(valid, (new.to(tl.int32) + (2**TILE_BITS - 1)) // 2**TILE_BITS, 0)
        first_tiles, writes = split(tiles)
        powers = powers_of(TILE_BITS)
    writes = tl.where(armed, writes, 0)

    # The last program has the fewest items.
    if armed & (program == programs - 1):
        if VERIFY:
            # Window 0 says that an earlier forward of the step has verified everything.
            outside = tl.where(valid & (window > 0), window_start, 0)
            count_verified(launch.report, visits, outside, halves, BLOCK)
        if HEAD and WRITE:
            misplaced = request < 0
            if row_words is not None and ext_lens is None:
                misplaced = padding_with_slots(batch, row, request, out_cache_loc)
            report_bad_requests(launch, row, prefix, valid, request, misplaced, halves)

    diverged = tl.full([], 0, tl.int32)
    written = tl.full([], 0, tl.int32)
    v_written = tl.full([], 0, tl.int32)
    if VERIFY:
        weights_age = None
        if HEAD:  # TAIL reads the same slots
            weights_age = weights_age_of(summary, forward)
        diverged = verify(launch, visits, weights_age, BLOCK)
    if WRITE:
        first_write = first_write_of(visits)
        lane = tl.arange(0, WRITE_BLOCK)
        if not HEAD:
            for item in range(first_write, writes, programs):
                token = item * WRITE_BLOCK + lane
                full = tl.load(out_cache_loc + tl.minimum(token, num_tokens - 1)).to(tl.int64)
                slot, reasons = translate(launch.space, tl.where(token < num_tokens, full, 0))
                copied, v_copied = copy_head(
                    k_head, v_head, k_records, v_records, slot, reasons == 0, forward
                )
                written += copied
                v_written += v_copied
        elif TILE_BITS == 0:
            # Loaded a turn ahead, else ptxas puts these loads behind those of the records before.
            beyond = tl.where(lane < per_block, 0, num_tokens)
            tokens = flat_tokens(launch, first_write * per_block + lane + beyond, SINGLE)
            for item in range(first_write, writes, programs):
                following = (item + programs) * per_block + lane + beyond
                more = flat_tokens(launch, following, SINGLE)
                written += write_flat(launch, tokens, SINGLE)
                tokens = more
        else:
            for item in range(first_write, writes, programs):
                index, first = item_of(item, first_tiles, tiles, request)
                written += write_tile(launch, powers, index, item - first, 2**TILE_BITS)

    if HEAD and halves == 2:
        v_written = written
    if written > 0:
        count(launch.report, 0, WRITTEN, written)
    if v_written > 0:
        count(launch.report, 1, WRITTEN, v_written)
    if diverged > 0:
        for half in range(halves):
            count(launch.report, half, IDX_DIVERGENCE, diverged)
