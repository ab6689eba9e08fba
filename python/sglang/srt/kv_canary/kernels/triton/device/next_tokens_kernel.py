"""What was sampled for each request, noted in the row memory: one lane per request."""

from __future__ import annotations

import triton.language as tl

from ..jit import jit
from .record import FORWARD_MASK, MULTIPLIER, mix64, pack_identity
from .rows import ROW_CHAIN, ROW_LENGTH, ROW_WORDS


@jit
def _token_at(tokens, places, at, lanes, num_tokens):
    """Token `at` of `lanes`, int64; 0 elsewhere."""
    if places is not None:
        at = tl.load(places + at, mask=lanes, other=0).to(tl.int32)
        lanes = lanes & (at >= 0) & (at < num_tokens)
        at = tl.where(lanes, at, 0)
    return tl.load(tokens + at, mask=lanes, other=0).to(tl.int64)


@jit(
    do_not_specialize=["batch_size", "num_rows", "tokens_each", "num_tokens"],
    do_not_specialize_on_alignment=["rows", "tokens", "places", "counts"],
)
def next_tokens_kernel(
    row_words,  # of all pool kinds
    sampled,
    rows,
    tokens,
    places,  # where in `tokens` they are, in the same order; None: side by side
    counts,  # None: one token each
    batch_size,
    num_rows,
    tokens_each,
    num_tokens,  # in `tokens`
    KINDS: tl.constexpr,  # bit k: pool kind k has row memory
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    listed = index < batch_size
    row = tl.load(rows + index, mask=listed, other=0).to(tl.int64)
    count = index * 0 + 1
    if counts is not None:
        count = tl.load(counts + index, mask=listed, other=0).to(tl.int32)
    listed = listed & (row > 0) & (row < num_rows) & (count > 0) & (count <= tokens_each)
    row = tl.where(listed, row, 0)
    first = index * tokens_each
    last = _token_at(tokens, places, first + count - 1, listed, num_tokens)
    for kind in tl.static_range(32):
        if ((KINDS >> kind) & 1) != 0:
            words = row_words + (kind * num_rows + row) * ROW_WORDS
            word = tl.load(words + ROW_LENGTH, mask=listed, other=0)
            length = (word & FORWARD_MASK) - 1
            known = listed & (length >= 0)
            if counts is not None:
                chain = tl.load(words + ROW_CHAIN, mask=known, other=0)
                for i in range(tokens_each - 1):
                    accepted = known & (i < count - 1)
                    token = _token_at(tokens, places, first + i, accepted, num_tokens)
                    longer = chain * MULTIPLIER + mix64(pack_identity(token, length + i))
                    chain = tl.where(accepted, longer, chain)
                tl.store(words + ROW_LENGTH, word + count - 1, mask=known)
                tl.store(words + ROW_CHAIN, chain, mask=known)
            noted = (last & FORWARD_MASK) | ((word >> 32) << 32)
            tl.store(sampled + row, noted, mask=known)
