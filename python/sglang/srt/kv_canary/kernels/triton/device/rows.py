"""Row memory inside the kernels: is a request's row still what its last forward left, and was its token sampled?

One lane per request, in the program that writes the request's last certain token, so that no other program touches
the same words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from .... import record
from ....plan.expected_inputs import RowStart
from ..jit import jit, sum_of
from .record import (
    CHAIN,
    FORWARD_MASK,
    LIVE,
    REASON_ROW_CHAIN,
    REASON_ROW_LENGTH,
    UNKNOWN,
    WORDS,
    WRITER,
    position_of,
    state_of,
    token_of,
    translate,
)
from .report import append_rows
from .spans import START, START_CHAIN, span_word

ROW_WORDS = tl.constexpr(record.ROW_WORDS)
ROW_LENGTH = tl.constexpr(record.ROW_WORD_LENGTH)
ROW_CHAIN = tl.constexpr(record.ROW_WORD_CHAIN)
KEEP = tl.constexpr(int(RowStart.KEEP))
FORGET = tl.constexpr(int(RowStart.FORGET))
DECODES = tl.constexpr(int(RowStart.DECODES))


class Rows(NamedTuple):
    """Row memory of the group, as `state.RowMemory` has it."""

    words: Any  # None: the group keeps none
    sampled: Any
    growth: Any  # tokens that a row may have grown by since a forward with nothing noted


class RememberedLanes(NamedTuple):
    """What is known of each lane's row, int64."""

    length: Any  # -1: nothing
    chain: Any
    sampled: Any  # the token that follows; UNKNOWN where nothing says so
    growth: Any  # tokens that the row may have grown by since; 0 where that is known


@jit
def remember(rows, known, request, row, lanes, UNIFORM: tl.constexpr):
    """What the host or the row's last forward says of `row`. UNIFORM: a batch without chunks of prompts."""
    safe = tl.where(lanes, row, 0)
    words = rows.words + safe * ROW_WORDS
    word = tl.load(words + ROW_LENGTH)
    chain = tl.load(words + ROW_CHAIN)
    token = tl.load(rows.sampled + safe)
    length = (word & FORWARD_MASK) - 1
    # 0: nothing was sampled yet, or the forward counter has just wrapped.
    fits = ((word >> 32) == (token >> 32)) & ((word >> 32) != 0)
    growth = tl.where(fits, 0, rows.growth).to(tl.int64)
    if known.spans is None:
        decodes = lanes if UNIFORM else lanes & False
    else:
        start = span_word(known, request, START, lanes, KEEP)
        told = start >= 0
        length = tl.where(told, start, tl.where(start == FORGET, -1, length))
        chain = tl.where(told, span_word(known, request, START_CHAIN, lanes, 0), chain)
        growth = tl.where(told, 0, growth)
        decodes = lanes & (start == DECODES)
        if UNIFORM:
            decodes = decodes | (start == KEEP)
    length = tl.where(lanes, length, -1)
    sampled = tl.where(decodes & fits & (length >= 0), token_of(token), UNKNOWN)
    return RememberedLanes(length, chain, sampled, growth)


@jit
def check_rows(launch, remembered, row, prefix, lanes):
    """Report rows whose length or chain is not what is remembered of them."""
    length = remembered.length
    known = lanes & (length >= 0)
    wrong_length = known & ((length > prefix) | (prefix - length > remembered.growth))
    last = tl.where(known & (wrong_length == 0), length - 1, -1)
    listed = last >= 0
    table = launch.batch.table
    at = tl.where(listed, row, 0) * table.row_stride + tl.maximum(last, 0)
    full = tl.load(table.slots + at).to(tl.int64)
    slot, slot_reasons = translate(launch.space, full)
    words = launch.records.k + slot * WORDS
    chain = tl.load(words + CHAIN)
    writer = tl.load(words + WRITER)
    readable = listed & (slot_reasons == 0) & (state_of(writer) == LIVE)
    wrong_chain = readable & (chain != remembered.chain)
    reasons = tl.where(wrong_length, REASON_ROW_LENGTH, tl.where(wrong_chain, REASON_ROW_CHAIN, 0))
    if sum_of((reasons != 0).to(tl.int32), 0) > 0:
        identity = tl.load(words)
        append_rows(
            launch.report,
            0,
            reasons,
            slot=tl.where(wrong_chain, slot, UNKNOWN),
            full_slot=tl.where(wrong_chain, full, UNKNOWN),
            expected_position=tl.where(wrong_chain, last, length),
            stored_position=tl.where(wrong_chain, position_of(identity), prefix),
            stored_token=tl.where(wrong_chain, token_of(identity), UNKNOWN),
            expected_chain=tl.where(wrong_chain, remembered.chain, UNKNOWN),
            stored_chain=tl.where(wrong_chain, chain, UNKNOWN),
            reader_row=row,
            writer=tl.where(wrong_chain, writer, 0),
        )


@jit
def store_rows(rows, forward, row, length, chain, lanes):
    """The rows' last forward leaves them with `length` tokens, the last of which has `chain`."""
    words = rows.words + tl.where(lanes, row, 0) * ROW_WORDS
    word = (length + 1) | ((forward & FORWARD_MASK) << 32)
    tl.store(words + ROW_LENGTH, word, mask=lanes)
    tl.store(words + ROW_CHAIN, chain, mask=lanes)
