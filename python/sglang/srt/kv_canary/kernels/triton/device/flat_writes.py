"""Work items that write a lane per token, of batches whose requests have equally many new tokens."""

from __future__ import annotations

import triton.language as tl

from ..jit import jit, max_of, sum_of
from .record import MULTIPLIER, UNKNOWN, mix64, pack_identity, store_record, translate, writer_word
from .rows import RememberedLanes, check_rows, remember, store_rows
from .spans import known_token, request_at
from .writes import Tokens, chain_of, identity_at, report_inputs, slot_before, token_at


@jit
def whole_requests(tokens_per_request, BLOCK: tl.constexpr):
    """Tokens of a block that holds whole requests: a request's row memory is read and stored by one program."""
    each = tl.maximum(tokens_per_request, 1)
    return tl.where(each <= BLOCK, BLOCK // each * each, BLOCK)


@jit
def _parent_of(inputs, at, place, lanes):
    """Number, within its request, of the earlier token that token `at`, the request's `place`-th, follows; or -1."""
    if inputs.parents is None:
        parent = place - 1
    else:
        parent = tl.load(inputs.parents + at, mask=lanes, other=-1).to(tl.int32)
        parent = tl.where((parent >= 0) & (parent < place), parent, -1)
    return tl.where(lanes, parent, -1)


@jit
def flat_tokens(launch, index, SINGLE: tl.constexpr):
    """Tokens `index` of a batch whose requests have equally many. SINGLE: one token per request."""
    batch, inputs, rows = launch.batch, launch.inputs, launch.rows
    request = index if SINGLE else index // tl.maximum(batch.tokens_per_request, 1)
    row, prefix, _, valid = request_at(batch, request)
    lanes = valid & (index < inputs.num_tokens)
    token = token_at(inputs, index, lanes)
    position = tl.load(inputs.positions + index, mask=lanes, other=0).to(tl.int64)
    full = tl.load(inputs.out_cache_loc + index, mask=lanes, other=0).to(tl.int64)
    anchor = tl.load(launch.anchors + tl.where(lanes, row, 0))
    # Not None where there is no row memory: loops carry it, and Triton carries tensors only.
    remembered = RememberedLanes(row * 0 - 1, row * 0, row * 0, row * 0)
    if rows.words is not None:
        remembered = remember(rows, launch.known, request, row, lanes, True)
    return Tokens(index, request, lanes, row, prefix, token, position, full, anchor, remembered)


@jit
def write_flat(launch, tokens, SINGLE: tl.constexpr):
    """Chain and write `tokens`; number written.

    A lane walks from its token to the prefix, along the draft tree if there is one.
    """
    batch, inputs, rows, records = launch.batch, launch.inputs, launch.rows, launch.records
    lanes, row, prefix = tokens.lanes, tokens.row, tokens.prefix
    slot, reasons = translate(launch.space, tokens.full)
    keep = lanes & (reasons == 0)
    identity = pack_identity(tokens.token, tokens.position)
    gathered = mix64(identity)
    power = gathered * 0 + MULTIPLIER
    expected_position = prefix
    if not SINGLE:
        first = tokens.request * batch.tokens_per_request
        place = tokens.index - first
        parent = _parent_of(inputs, tokens.index, place, lanes)
        while max_of(parent, 0) >= 0:
            more = parent >= 0
            at = first + parent
            mixed = mix64(identity_at(inputs, at, more))
            gathered = tl.where(more, gathered + power * mixed, gathered)
            power = tl.where(more, power * MULTIPLIER, power)
            expected_position = expected_position + more.to(tl.int64)
            parent = _parent_of(inputs, at, parent, more)
    writer = writer_word(launch.report.forward, row, inputs.mode)
    expected = known_token(launch.known, tokens.request, expected_position, lanes)
    anchor = tokens.anchor
    if records.source is None:
        otherwise = gathered * 0
        if rows.words is not None:
            remembered = tokens.remembered
            # Padding of graphs keeps stale rows; its slot is 0.
            first_lanes = lanes & (tokens.full != 0)
            if not SINGLE:
                first_lanes = first_lanes & (place == 0)
            follows = remembered.length == prefix
            otherwise = tl.where(follows, remembered.chain, otherwise)
            sampled = tl.where(first_lanes & follows, remembered.sampled, UNKNOWN)
            expected = tl.where(expected == UNKNOWN, sampled, expected)
            check_rows(launch, remembered, row, prefix, first_lanes)
        before, readable = slot_before(launch, row, prefix, lanes)
        seed = chain_of(records.k, before, readable, anchor, prefix, otherwise)
        chain = power * seed + gathered
        if records.v is not None:
            seed = chain_of(records.v, before, readable, anchor, prefix, otherwise)
            store_record(records.v, slot, keep, identity, power * seed + gathered, writer)
        if rows.words is not None:
            store_rows(rows, launch.report.forward, row, prefix + 1, chain, first_lanes)
    else:
        before, readable = slot_before(launch, row, expected_position, lanes)
        seed = chain_of(records.source, before, readable, anchor, expected_position, 0)
        chain = seed * MULTIPLIER + mix64(identity)
        if records.v is not None:
            store_record(records.v, slot, keep, identity, chain, writer)
    store_record(records.k, slot, keep, identity, chain, writer)
    report_inputs(launch, tokens, slot, reasons, expected_position, expected)
    return sum_of(keep.to(tl.int32), 0)
