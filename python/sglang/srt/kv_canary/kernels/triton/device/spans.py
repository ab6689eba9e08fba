"""Requests of a batch as vectors inside a program, and which request a work item belongs to.

Every program derives all work items by itself from the batch's lengths: no plan launch, no plan in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ....plan.expected_inputs import SPAN_WORDS as _SPAN_WORDS
from ... import layout
from ..jit import cumsum_of, jit, max_of, sum_of
from .record import FORWARD_MASK, UNKNOWN

TURN_MULTIPLIER = tl.constexpr(layout.TURN_MULTIPLIER)
SPAN_WORDS = tl.constexpr(_SPAN_WORDS)
# Words of a span, as ExpectedTokens has them
OFFSET = tl.constexpr(0)
FIRST = tl.constexpr(1)
LENGTH = tl.constexpr(2)
START = tl.constexpr(3)
START_CHAIN = tl.constexpr(4)


# Arguments of every kernel that works on a batch. Specialising on these values, or on where these views begin, would
# compile a kernel again in the middle of serving.
BATCH_INTEGERS = [
    "prefix_delta",
    "batch_size",
    "num_tokens",
    "tokens_per_request",
    "row_stride",
    "num_rows",
    "context",
    "full_limit",
    "num_slots",
    "window",
    "capacity",
    "tag",
]
BATCH_VIEWS = ["rows", "base_lens", "ext_lens", "starts", "first_slots", "out_cache_loc"]


class Table(NamedTuple):
    """`req_to_token`, with its shape."""

    slots: Any
    row_stride: Any
    num_rows: Any
    context: Any  # columns


class Batch(NamedTuple):
    """The requests of a forward, as ForwardPlan has them."""

    table: Any
    rows: Any
    base_lens: Any
    ext_lens: Any  # None: every request has tokens_per_request new tokens
    prefix_delta: Any
    tokens_per_request: Any
    size: Any
    window: Any  # prefix tokens before the last `window` are not verified
    first_slots: Any  # new slots; a request whose first one is 0 is padding. None: only row 0 is


class Known(NamedTuple):
    """The host's own token lists, as ExpectedTokens has them."""

    tokens: Any  # None: no lists
    spans: Any
    num_spans: Any
    num_tokens: Any
    offset: Any  # slot p holds the token at position p + offset


@jit
def turn_of(forward, every):
    """`layout.turn_of` of an int64 forward number and an int32 k, as int32."""
    fraction = (forward * TURN_MULTIPLIER) & FORWARD_MASK
    return ((fraction * every.to(tl.int64)) >> 32).to(tl.int32)


@jit
def request_at(batch, index):
    """(row, prefix length, new tokens, valid) of requests `index`; int64, and int1 `valid`.

    Valid: neither padding nor out of range. What is not valid must not be used as an address.
    """
    listed = index < batch.size
    row = tl.load(batch.rows + index, mask=listed, other=0).to(tl.int64)
    if batch.first_slots is not None:
        first = batch.first_slots + index * batch.tokens_per_request
        row = tl.where(tl.load(first, mask=listed, other=0) == 0, 0, row)
    prefix = tl.load(batch.base_lens + index, mask=listed, other=0).to(tl.int64)
    prefix = prefix + batch.prefix_delta
    if batch.ext_lens is None:
        new = prefix * 0 + batch.tokens_per_request
    else:
        new = tl.load(batch.ext_lens + index, mask=listed, other=0).to(tl.int64)
    new = tl.maximum(new, 0)
    valid = listed & (row > 0) & (row < batch.table.num_rows) & (prefix >= 0)
    # Each below `context` first: their sum cannot wrap.
    valid = valid & (prefix <= batch.table.context) & (new <= batch.table.context)
    return row, prefix, new, valid & (prefix + new <= batch.table.context)


@jit
def split(sizes):
    """Exclusive prefix sums and total of int32 `sizes`."""
    return cumsum_of(sizes) - sizes, sum_of(sizes, 0)


@jit
def item_of(item, firsts, sizes, requests):
    """(request, first item of that request) that `item` belongs to; `firsts`, `sizes` as in `split`."""
    mine = (firsts <= item) & (sizes > 0)
    packed = max_of(tl.where(mine, (firsts.to(tl.int64) << 32) | requests.to(tl.int64), -1), 0)
    return (packed & 0x7FFFFFFF).to(tl.int32), (packed >> 32).to(tl.int32)


@jit
def span_word(known, request, word: tl.constexpr, lanes, other: tl.constexpr):
    """A word of the spans of `request`; `other` where the host has said nothing."""
    listed = lanes & (request < known.num_spans)
    return tl.load(known.spans + request * SPAN_WORDS + word, mask=listed, other=other)


@jit
def known_token(known, request, position, lanes):
    """The host's token of `lanes` at `position` of `request`, UNKNOWN where there is none.

    `request`: one per lane, or one for all lanes, whose span is loaded once.
    """
    token = tl.full(position.shape, UNKNOWN, tl.int64)
    if known.spans is not None:
        exists = request >= 0
        offset = span_word(known, request, OFFSET, exists, 0)
        first = span_word(known, request, FIRST, exists, 0)
        length = span_word(known, request, LENGTH, exists, 0)
        place = position + known.offset
        at = offset + place - first
        listed = lanes & (place >= first) & (place < first + length)
        listed = listed & (at >= 0) & (at < known.num_tokens)
        found = tl.load(known.tokens + at, mask=listed, other=0).to(tl.int64)
        token = tl.where(listed, found, token)
    return token
