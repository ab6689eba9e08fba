"""What forward_kernel and strided_kernel do first: number the forward, share out visits, count."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ..jit import jit, sum_of
from .record import REASON_LENGTH_OUT_OF_RANGE, REASON_ROW_OUT_OF_RANGE
from .report import (
    ARMED,
    CHECKED,
    COUNTERS,
    ELIGIBLE,
    FIRST_COUNTER,
    FORWARD_DONE,
    FORWARD_RUNNING,
    LAUNCHES,
    OUT_OF_WINDOW,
    TAG_V,
    append_rows,
)
from .spans import item_of, split, turn_of


@jit
def begin_forward(summary, HEAD: tl.constexpr, NUMBER: tl.constexpr):
    """(number of the running forward, whether the canary is armed). HEAD numbers it, TAIL marks it done."""
    GIVES_OUT: tl.constexpr = HEAD and NUMBER
    forward = tl.load(summary + (FORWARD_DONE if GIVES_OUT else FORWARD_RUNNING))
    if GIVES_OUT:
        forward += 1
    armed = tl.load(summary + ARMED) != 0
    # The word that no program of this launch reads.
    if NUMBER and tl.program_id(0) == 0:
        if HEAD:
            tl.store(summary + FORWARD_RUNNING, forward)
        else:
            tl.store(summary + FORWARD_DONE, forward)
    return forward, armed


class Visits(NamedTuple):
    """Which blocks of slots a launch verifies: every `every`-th one of all requests, from `phase` on."""

    slots: Any  # to verify, per request; int32
    blocks: Any  # of each request
    first_blocks: Any  # number of each request's first block
    requests: Any
    every: Any
    phase: Any
    number: Any  # blocks that are visited


@jit
def visits_of(
    slots, requests, budget_blocks, forward, armed, VERIFY: tl.constexpr, BLOCK: tl.constexpr
):
    """The visits of `forward`, `budget_blocks` at most, where `requests` have so many `slots` to verify."""
    blocks = (slots + (BLOCK - 1)) // BLOCK
    first_blocks, total_blocks = split(blocks)
    every = tl.maximum((total_blocks + budget_blocks - 1) // budget_blocks, 1)
    phase = turn_of(forward, every)
    number = total_blocks * 0
    if VERIFY:
        number = tl.maximum(total_blocks - phase + every - 1, 0) // every
    number = tl.where(armed, number, 0)
    return Visits(slots, blocks, first_blocks, requests, every, phase, number)


@jit
def visited_block(visits, item):
    """(request, number, number of the request's first block) of the `item`-th block that is visited."""
    number = visits.phase + item * visits.every
    index, first = item_of(number, visits.first_blocks, visits.blocks, visits.requests)
    return index, number, first


@jit
def first_write_of(visits):
    """The program's first write item: writes go on, round robin, where the visits end."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    return (program + programs - visits.number % programs) % programs


@jit
def padding_with_slots(batch, row, request, out_cache_loc):
    """Requests of a uniform batch with padding row 0 and a slot for their first new token."""
    padding = (row == 0) & (request < batch.size)
    at = request * batch.tokens_per_request
    full = tl.load(out_cache_loc + at, mask=padding & (batch.tokens_per_request > 0), other=0)
    return padding & (full != 0)


@jit
def report_bad_requests(launch, row, prefix, valid, request, misplaced, halves: tl.constexpr):
    """`misplaced`: requests whose row is known to be another's."""
    batch = launch.batch
    bad_row = (row < 0) | (row >= batch.table.num_rows) | misplaced
    bad_length = (row != 0) & (valid == 0) & (bad_row == 0)
    reasons = tl.where(
        bad_row, REASON_ROW_OUT_OF_RANGE, tl.where(bad_length, REASON_LENGTH_OUT_OF_RANGE, 0)
    )
    reasons = tl.where(request < batch.size, reasons, 0)
    if sum_of((reasons != 0).to(tl.int32), 0) > 0:
        for half in range(halves):
            append_rows(launch.report, half, reasons, expected_position=prefix, reader_row=row)


@jit
def count_verified(report, visits, outside, halves: tl.constexpr, BLOCK: tl.constexpr):
    """Count the launch, and what all programs check together: full blocks visited, less what short last blocks lack.

    A launch that only writes does not count. If it is lost, the forward counter shows it. Further scratch has no
    counter, and nobody reads scratch. A lost check shows here only.
    """
    eligible, blocks, first_blocks = visits.slots, visits.blocks, visits.first_blocks
    every, phase = visits.every, visits.phase
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
