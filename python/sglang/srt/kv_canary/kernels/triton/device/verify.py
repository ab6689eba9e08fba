"""Work items that verify: blocks of the requests' prefixes."""

from __future__ import annotations

import triton.language as tl

from ..jit import jit, max_of, sum_of
from .check import Lanes, difference, load_words, report_lanes, suspicious
from .prologue import visited_block
from .record import PREV_ANCHOR, PREV_UNREACHABLE, half_offset, has_stale_weights, translate
from .spans import known_token


@jit
def _block_at(launch, visits, item, BLOCK: tl.constexpr):
    """Lanes of the `item`-th block that is visited; slots and positions are int32."""
    batch, space = launch.batch, launch.space
    index, number, first = visited_block(visits, item)
    row = tl.load(batch.rows + index).to(tl.int64)
    # Visited requests are valid: their lengths fit, and slots that fit the pool do.
    prefix = (tl.load(batch.base_lens + index) + batch.prefix_delta).to(tl.int32)
    start = tl.maximum(prefix - batch.window, 0)
    lane = tl.arange(0, BLOCK)
    position = start + (number - first) * BLOCK + lane
    lanes = position < prefix
    has_prev = lanes & (position > start)
    tokens = batch.table.slots + row * batch.table.row_stride
    # Not masked: predicates are few, and a compiler that runs out of them puts misses behind each other.
    at = tl.minimum(position, prefix - 1)
    full = tl.load(tokens + at)
    prev_full = tl.load(tokens + tl.maximum(at - 1, 0))
    anchor = tl.load(launch.anchors + row)
    slot, reasons = translate(space, full)
    prev_slot, prev_reasons = translate(space, prev_full)
    slot, prev_slot = slot.to(tl.int32), prev_slot.to(tl.int32)
    prev_slot = tl.where(has_prev & (prev_reasons == 0), prev_slot, PREV_UNREACHABLE)
    prev_slot = tl.where(position == 0, PREV_ANCHOR, prev_slot)
    expected = known_token(launch.known, index, position, lanes)
    return Lanes(
        rows=row,
        positions=position,
        listed=lanes,
        full_slots=full,
        slots=slot,
        reasons=reasons,
        prev_slots=prev_slot,
        anchors=anchor,
        expected_tokens=expected,
    )


@jit
def _v_prev_slots(lanes):
    """A lane's predecessor is the lane before it, so only lane 0's is left to compare with V's."""
    first = tl.arange(0, lanes.slots.shape[0]) == 0
    return tl.where(first, lanes.prev_slots, PREV_UNREACHABLE)


@jit
def _load_block(records, lanes):
    """Words of `lanes`: K's, and V's (K's again where there is no V)."""
    chained_to = records.k if records.source is None else records.source
    words = load_words(records.k, chained_to, lanes.slots, lanes.prev_slots)
    v_words = words
    if records.v is not None:
        v_chained_to = records.v if records.source is None else records.source
        v_words = load_words(records.v, v_chained_to, lanes.slots, _v_prev_slots(lanes))
    return words, v_words


@jit
def _suspects(lanes, words, v_words, forward, weights_age, UNFILLS: tl.constexpr):
    """`lanes` that may be bad, as int32."""
    bad = suspicious(words, lanes, UNFILLS)
    bad = bad | difference(words, v_words, _v_prev_slots(lanes))
    if weights_age is not None:
        bad = bad | has_stale_weights(words.writer, forward, weights_age)
    return (lanes.listed & ((bad | lanes.reasons) != 0)).to(tl.int32)


@jit
def _elsewhere(lanes):
    """Lanes whose slot has another index than its full slot, as int32."""
    return (lanes.listed & (lanes.reasons == 0) & (lanes.slots != lanes.full_slots)).to(tl.int32)


@jit
def _report_block(lanes, report, weights_age, records):
    """Check `lanes` one by one and report what fails."""
    offset = half_offset(records.k, records.v)
    for half in range(1 if records.v is None else 2):
        own = records.k + half * offset
        chained_to = own if records.source is None else records.source
        report_lanes(
            report, half, own, chained_to, lanes, records.source is not None, 1, weights_age
        )


@jit
def verify(launch, visits, weights_age, BLOCK: tl.constexpr):
    """Verify the program's share of the visited blocks; number of slots whose index differs from the full one.

    `weights_age`: None where stale weights are not reported.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    records, forward = launch.records, launch.report.forward
    UNFILLS: tl.constexpr = records.source is not None
    elsewhere = tl.full([BLOCK], 0, tl.int32)
    suspects = tl.full([BLOCK], 0, tl.int32)
    if program < visits.number:
        # Words are loaded a turn before they are checked, slots a turn before that: no load waits for another.
        block = _block_at(launch, visits, program, BLOCK)
        words, v_words = _load_block(records, block)
        more = block
        if program + programs < visits.number:
            more = _block_at(launch, visits, program + programs, BLOCK)
        for item in range(program + programs, visits.number, programs):
            more_words, more_v_words = _load_block(records, more)
            further = _block_at(
                launch, visits, tl.minimum(item + programs, visits.number - 1), BLOCK
            )
            suspects |= _suspects(block, words, v_words, forward, weights_age, UNFILLS)
            elsewhere += _elsewhere(block)
            block, words, v_words, more = more, more_words, more_v_words, further
        suspects |= _suspects(block, words, v_words, forward, weights_age, UNFILLS)
        elsewhere += _elsewhere(block)
    # In a loop of its own, which nearly never runs: its registers and branches would slow down the other.
    if max_of(suspects, 0) > 0:
        for item in range(program, visits.number, programs):
            block = _block_at(launch, visits, item, BLOCK)
            _report_block(block, launch.report, weights_age, records)
    diverged = tl.full([], 0, tl.int32)
    if launch.space.lut is not None:
        diverged = sum_of(elsewhere, 0)
    return diverged
