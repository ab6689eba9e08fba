"""The check of record lanes inside the kernels: a cheap test of a whole block, then an exact report.

Nearly every block is clean. So the test reads little, and only says whether a lane may be bad. The report reads the
records again, decides lane by lane exactly as the NumPy reference does, and fills ring rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ..jit import jit, sum_of
from .record import (
    CHAIN,
    CONTENT,
    LIVE,
    MULTIPLIER,
    PREV_ANCHOR,
    REASON_CHAIN,
    REASON_POSITION,
    REASON_STALE_WEIGHTS,
    REASON_TOKEN,
    REASON_UNWRITTEN_SINCE_ALLOC,
    REASON_USE_AFTER_FREE,
    UNFILLED,
    UNKNOWN,
    WORDS,
    WRITER,
    has_stale_weights,
    mix64,
    position_of,
    raw_state,
    state_of,
    state_reasons,
    token_of,
    writer_damage,
)
from .report import append_rows


@jit
def chain_fold(chain, previous, STRIDE: tl.constexpr):
    """`record.chain_fold` of int64 lanes, as int64."""
    power = tl.full([], MULTIPLIER, tl.int64)
    for bit in tl.static_range(1, 16):
        if (STRIDE >> bit) != 0:  # strides are powers of two
            power = power * power
    return token_of(mix64(chain - previous * power))


class Lanes(NamedTuple):
    """Slots to check, one per lane: int32 or int64."""

    rows: Any  # reader's request row
    positions: Any
    listed: Any  # int1: whether the lane holds a slot
    full_slots: Any
    slots: Any
    reasons: Any  # int32, what is wrong before the record is read; such lanes are not read
    prev_slots: Any  # or PREV_ANCHOR / PREV_UNREACHABLE
    anchors: Any
    expected_tokens: Any  # UNKNOWN where the token is not known


class Words(NamedTuple):
    """What the check reads of one record per lane, int64, and of its predecessor's."""

    identity: Any
    chain: Any
    writer: Any
    previous: Any  # the predecessor's chain; that of slot 0 where there is no slot to read it from


@jit
def load_words(records, chained_to, slots, prev_slots):
    """Words of `slots`, all readable. A predecessor is a slot of `chained_to`, or negative."""
    words = records + slots.to(tl.int64) * WORDS
    identity = tl.load(words)
    chain = tl.load(words + CHAIN)
    writer = tl.load(words + WRITER)
    before = chained_to + tl.maximum(prev_slots, 0).to(tl.int64) * WORDS + CHAIN
    return Words(identity, chain, writer, tl.load(before))


@jit
def suspicious(words, lanes, UNFILLS: tl.constexpr, STRIDE: tl.constexpr = 1):
    """Words that are not 0 in `lanes` that may be bad, by their `words`; UNFILLS and STRIDE as in `report_lanes`.

    A predecessor that is not live counts as readable here: if the chain fits it all the same, nothing is wrong.
    """
    previous = tl.where(lanes.prev_slots == PREV_ANCHOR, lanes.anchors, words.previous)
    if STRIDE == 1:
        broken = words.chain ^ (previous * MULTIPLIER + mix64(words.identity))
    else:
        broken = token_of(words.identity) ^ chain_fold(words.chain, previous, STRIDE)
    state = raw_state(words.writer)
    bad = (state ^ LIVE) | (position_of(words.identity) ^ lanes.positions)
    bad = bad | tl.where(lanes.prev_slots < PREV_ANCHOR, 0, broken)
    wrong = token_of(words.identity) ^ lanes.expected_tokens
    bad = bad | tl.where(lanes.expected_tokens == UNKNOWN, 0, wrong)
    if UNFILLS:
        bad = tl.where(state == UNFILLED, 0, bad)
    return bad | writer_damage(words.writer)


@jit
def difference(words, others, prev_slots):
    """Words that are not 0 in lanes that differ, in their predecessors' chain too where there is a predecessor slot.

    K and V, HEAD and TAIL carry the same words.
    """
    other = (words.identity ^ others.identity) | (words.chain ^ others.chain)
    other = other | (words.writer ^ others.writer)
    return other | tl.where(prev_slots >= 0, words.previous ^ others.previous, 0)


@jit
def report_lanes(
    report,
    half,
    records,
    chained_to,
    lanes,
    UNFILLS: tl.constexpr,
    STRIDE: tl.constexpr = 1,
    weights_age=None,
    OUTSIDE: tl.constexpr = False,
):
    """Check `lanes` exactly and append what fails.

    Predecessors are slots of the records `chained_to`. UNFILLS: the pool's records may be unfilled. With a stride
    the ring gets folds of chains (`record.chain_fold`) as tokens. `weights_age` comes from `weights_age_of`. None:
    stale weights are not reported. Half K reports the first slot of each run that old weights wrote. OUTSIDE as in
    `append_rows`.
    """
    slots, full_slots = lanes.slots.to(tl.int64), lanes.full_slots.to(tl.int64)
    prev_slots, positions = lanes.prev_slots.to(tl.int64), lanes.positions.to(tl.int64)
    expected_tokens = lanes.expected_tokens
    readable = lanes.listed & (lanes.reasons == 0)
    words = records + tl.where(readable, slots, 0) * WORDS
    identity = tl.load(words, mask=readable, other=0)
    chain = tl.load(words + CHAIN, mask=readable, other=0)
    content = tl.load(words + CONTENT, mask=readable, other=0)
    writer = tl.load(words + WRITER, mask=readable, other=0)

    has_prev = readable & (prev_slots >= 0)
    prev_words = chained_to + tl.where(has_prev, prev_slots, 0) * WORDS
    previous = tl.load(prev_words + CHAIN, mask=has_prev, other=0)
    prev_live = state_of(tl.load(prev_words + WRITER, mask=has_prev, other=0)) == LIVE
    from_anchor = prev_slots == PREV_ANCHOR
    previous = tl.where(from_anchor, lanes.anchors, previous)
    chained = readable & ((has_prev & prev_live) | from_anchor)
    if STRIDE == 1:
        expected_chain = tl.where(chained, previous * MULTIPLIER + mix64(identity), UNKNOWN)
        # UNKNOWN doubles as "no chain to compare", as in the reference.
        wrong_chain = (expected_chain != UNKNOWN) & (chain != expected_chain)
    else:
        expected_chain = tl.full(chain.shape, UNKNOWN, tl.int64)
        fold = chain_fold(chain, previous, STRIDE)
        wrong_chain = chained & (token_of(identity) != fold)

    state = state_of(writer)
    not_live = state_reasons(state, UNFILLS)
    reasons = tl.where(position_of(identity) != positions, REASON_POSITION, 0)
    wrong_token = (expected_tokens != UNKNOWN) & (token_of(identity) != expected_tokens)
    reasons = reasons | tl.where(wrong_token, REASON_TOKEN, 0)
    reasons = reasons | tl.where(wrong_chain, REASON_CHAIN, 0)
    if weights_age is not None:
        stale = has_stale_weights(writer, report.forward, weights_age)
        own_prev = records + tl.where(has_prev, prev_slots, 0) * WORDS + WRITER
        before = tl.load(own_prev, mask=has_prev, other=0)
        goes_on = (state_of(before) == LIVE) & has_stale_weights(
            before, report.forward, weights_age
        )
        begins = stale & (goes_on == 0) & (half == 0)
        reasons = tl.where((reasons == 0) & begins, REASON_STALE_WEIGHTS, reasons)
    reasons = tl.where(state == LIVE, reasons, not_live)
    reasons = tl.where(readable, reasons, lanes.reasons)
    reasons = tl.where(lanes.listed, reasons, 0)
    if STRIDE != 1:
        expected_tokens = tl.where(chained, fold, UNKNOWN)
    freed = readable & (
        (not_live == REASON_USE_AFTER_FREE) | (not_live == REASON_UNWRITTEN_SINCE_ALLOC)
    )

    if sum_of((reasons != 0).to(tl.int32), 0) > 0:
        append_rows(
            report,
            half,
            reasons,
            slot=tl.where(readable, slots, UNKNOWN),
            full_slot=full_slots,
            prev_slot=prev_slots,
            expected_position=positions,
            stored_position=tl.where(readable, position_of(identity), UNKNOWN),
            expected_token=expected_tokens,
            stored_token=tl.where(readable, token_of(identity), UNKNOWN),
            expected_chain=expected_chain,
            stored_chain=tl.where(readable, chain, UNKNOWN),
            reader_row=lanes.rows,
            writer=tl.where(readable, writer, UNKNOWN),
            last_writer=tl.where(freed, content, 0),
            OUTSIDE=OUTSIDE,
        )
