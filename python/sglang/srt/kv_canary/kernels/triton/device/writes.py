"""Work items that write records: a tile of a chunk, a block of uniform requests' tokens, TAIL's copies of HEAD."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ..jit import cumsum_of, jit, max_of, sum_of
from .record import (
    BAD_SLOT,
    BAD_WRITE_LOCATION,
    BAD_WRITE_POSITION,
    BAD_WRITE_TOKEN,
    CHAIN,
    FORWARD_MASK,
    LIVE,
    MULTIPLIER,
    MULTIPLIER_INVERSE,
    UNKNOWN,
    WORDS,
    WRITER,
    append_rows,
    mix64,
    pack_identity,
    state_of,
    store_record,
    translate,
    writer_word,
)
from .rows import Remembered, check_rows, remember, store_rows
from .spans import known_token, request_at


class Inputs(NamedTuple):
    """The forward's new tokens, as WritePlan has them."""

    input_ids: Any
    positions: Any
    out_cache_loc: Any
    swa_out_cache_loc: Any  # None: not to be compared
    starts: Any
    parents: Any  # None: tokens follow each other
    num_tokens: Any
    mode: Any


@jit
def lane_powers(base, BITS: tl.constexpr):
    """(base ** lane of 2 ** BITS lanes, base ** (2 ** BITS))."""
    lane = tl.arange(0, 2**BITS)
    power = tl.full([2**BITS], 1, tl.int64)
    square = tl.full([], base, tl.int64)
    for bit in tl.static_range(BITS):
        power = tl.where(((lane >> bit) & 1) != 0, power * square, power)
        square = square * square
    return power, square


@jit
def _report_inputs(
    inputs,
    at,
    report,
    v_records,
    full,
    slot,
    slot_reasons,
    lanes,
    position,
    expected_position,
    token,
    expected,
    rows,
):
    """Ring rows of new tokens that are not what the request expects; padding (slot 0) has none."""
    faults = slot_reasons & BAD_SLOT
    faults = faults | tl.where(position != expected_position, BAD_WRITE_POSITION, 0)
    wrong_token = (expected != UNKNOWN) & (token != expected)
    faults = faults | tl.where(wrong_token, BAD_WRITE_TOKEN, 0)
    attention_slot = UNKNOWN
    if inputs.swa_out_cache_loc is not None:
        attention_slot = tl.load(inputs.swa_out_cache_loc + at, mask=lanes, other=0).to(tl.int64)
        elsewhere = (attention_slot != slot) & ((slot_reasons & BAD_SLOT) == 0)
        faults = faults | tl.where(elsewhere, BAD_WRITE_LOCATION, 0)
    faults = tl.where(lanes & (full != 0), faults, 0)
    if sum_of((faults != 0).to(tl.int32), 0) > 0:
        for half in range(1 if v_records is None else 2):
            append_rows(
                report,
                half,
                faults,
                tl.where((faults & BAD_SLOT) != 0, UNKNOWN, slot),
                full,
                UNKNOWN,
                expected_position,
                position,
                expected,
                token,
                UNKNOWN,
                UNKNOWN,
                UNKNOWN,
                UNKNOWN,
                rows,
                0,
                0,
                attention_slot,
            )


@jit
def _identity_at(inputs, at, lanes):
    token = tl.load(inputs.input_ids + at, mask=lanes, other=0)
    return pack_identity(token, tl.load(inputs.positions + at, mask=lanes, other=0))


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
def _slot_before(batch, space, row, position, lanes):
    """(slot before `position` of `row`, whether there is one whose record can be read). Nothing else is an address."""
    has_prev = lanes & (position > 0)
    before = tl.where(lanes, row, 0) * batch.row_stride + tl.where(has_prev, position - 1, 0)
    slot, reasons = translate(space, tl.load(batch.req_to_token + before).to(tl.int64))
    return slot, has_prev & (reasons == 0)


@jit
def _chain_of(records, slot, readable, anchor, position, otherwise):
    """Chain of `slot`, the anchor for the token at position 0; `otherwise` where it cannot be read."""
    chain = tl.load(records + slot * WORDS + CHAIN)
    return tl.where(position == 0, anchor, tl.where(readable, chain, otherwise))


class FlatTokens(NamedTuple):
    """New tokens of a batch whose requests have equally many, one per lane, as the forward's inputs have them."""

    index: Any
    request: Any
    lanes: Any  # those that hold a token of a valid request
    row: Any
    prefix: Any
    token: Any
    position: Any
    full: Any
    anchor: Any
    remembered: Any  # of each token's row


@jit
def flat_tokens(batch, inputs, anchors, rows, known, index, SINGLE: tl.constexpr):
    """Tokens `index`. SINGLE: one token per request."""
    request = index if SINGLE else index // tl.maximum(batch.tokens_per_request, 1)
    row, prefix, _, valid = request_at(batch, request)
    lanes = valid & (index < inputs.num_tokens)
    token = tl.load(inputs.input_ids + index, mask=lanes, other=0).to(tl.int64)
    position = tl.load(inputs.positions + index, mask=lanes, other=0).to(tl.int64)
    full = tl.load(inputs.out_cache_loc + index, mask=lanes, other=0).to(tl.int64)
    anchor = tl.load(anchors + tl.where(lanes, row, 0))
    # Not None where there is no row memory: loops carry it, and Triton carries tensors only.
    remembered = Remembered(row * 0 - 1, row * 0, row * 0, row * 0)
    if rows.words is not None:
        remembered = remember(rows, known, request, row, lanes, True)
    return FlatTokens(index, request, lanes, row, prefix, token, position, full, anchor, remembered)


@jit
def write_flat(
    batch,
    inputs,
    space,
    known,
    report,
    rows,
    tokens,
    chain_source,
    k_records,
    v_records,
    SINGLE: tl.constexpr,
):
    """Chain and write `tokens`; number written.

    A lane walks from its token to the prefix, along the draft tree if there is one.
    """
    lanes, row, prefix = tokens.lanes, tokens.row, tokens.prefix
    slot, reasons = translate(space, tokens.full)
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
            mixed = mix64(_identity_at(inputs, at, more))
            gathered = tl.where(more, gathered + power * mixed, gathered)
            power = tl.where(more, power * MULTIPLIER, power)
            expected_position = expected_position + more.to(tl.int64)
            parent = _parent_of(inputs, at, parent, more)
    writer = writer_word(report.forward, row, inputs.mode)
    expected = known_token(known, tokens.request, expected_position, lanes)
    anchor = tokens.anchor
    if chain_source is None:
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
            check_rows(batch, space, report, k_records, remembered, row, prefix, first_lanes)
        before, readable = _slot_before(batch, space, row, prefix, lanes)
        seed = _chain_of(k_records, before, readable, anchor, prefix, otherwise)
        chain = power * seed + gathered
        if v_records is not None:
            seed = _chain_of(v_records, before, readable, anchor, prefix, otherwise)
            store_record(v_records, slot, keep, identity, power * seed + gathered, writer)
        if rows.words is not None:
            store_rows(rows, report.forward, row, prefix + 1, chain, first_lanes)
    else:
        before, readable = _slot_before(batch, space, row, expected_position, lanes)
        seed = _chain_of(chain_source, before, readable, anchor, expected_position, 0)
        chain = seed * MULTIPLIER + mix64(identity)
        if v_records is not None:
            store_record(v_records, slot, keep, identity, chain, writer)
    store_record(k_records, slot, keep, identity, chain, writer)
    _report_inputs(
        inputs,
        tokens.index,
        report,
        v_records,
        tokens.full,
        slot,
        reasons,
        lanes,
        tokens.position,
        expected_position,
        tokens.token,
        expected,
        row,
    )
    return sum_of(keep.to(tl.int32), 0)


@jit
def _sum_before(inputs, first, tile, inverse_powers, tile_power, TILE: tl.constexpr):
    """(sum over the j tokens before a tile of A^(j-1-i) mix[i], A^j), four tiles a turn: their loads overlap."""
    lane = tl.arange(0, TILE)
    sums = tl.full([TILE], 0, tl.int64)
    power = tile_power * 0 + 1
    size = inputs.num_tokens
    for group in range(0, tile, 4):
        at_0 = first + group * TILE + lane
        at_1 = at_0 + TILE
        at_2 = at_1 + TILE
        at_3 = at_2 + TILE
        identity_0 = _identity_at(inputs, at_0, (at_0 >= 0) & (at_0 < size))
        identity_1 = _identity_at(inputs, at_1, (at_1 >= 0) & (at_1 < size) & (group + 1 < tile))
        identity_2 = _identity_at(inputs, at_2, (at_2 >= 0) & (at_2 < size) & (group + 2 < tile))
        identity_3 = _identity_at(inputs, at_3, (at_3 >= 0) & (at_3 < size) & (group + 3 < tile))
        sums = sums * tile_power + mix64(identity_0)
        power = power * tile_power
        if group + 1 < tile:
            sums = sums * tile_power + mix64(identity_1)
            power = power * tile_power
        if group + 2 < tile:
            sums = sums * tile_power + mix64(identity_2)
            power = power * tile_power
        if group + 3 < tile:
            sums = sums * tile_power + mix64(identity_3)
            power = power * tile_power
    # A^(TILE - 1 - lane) weighs what each lane gathered.
    return sum_of(sums * inverse_powers, 0) * tile_power * MULTIPLIER_INVERSE, power


@jit
def write_tile(
    batch,
    inputs,
    space,
    known,
    report,
    rows,
    anchors,
    chain_source,
    k_records,
    v_records,
    powers,
    inverse_powers,
    tile_power,
    index,
    tile,
    TILE: tl.constexpr,
):
    """Chain and write tokens tile * TILE .. of request `index`, which is valid; number written.

    With c the chain before the tile, chain[i] = A^i (A c + sum over j <= i of A^-j mix[j]): two vectors of powers
    and a prefix sum. c needs the mixes of the chunk's earlier tiles, which the program reads again: no program waits
    for another.
    """
    row = tl.load(batch.rows + index).to(tl.int64)
    prefix = tl.load(batch.base_lens + index).to(tl.int64) + batch.prefix_delta
    if batch.ext_lens is None:
        new = batch.tokens_per_request
        first = (index * new).to(tl.int64)
    else:
        new = tl.load(batch.ext_lens + index).to(tl.int32)
        first = tl.load(inputs.starts + index).to(tl.int64)
    lane = tl.arange(0, TILE)
    in_chunk = tile * TILE + lane
    at = first + in_chunk
    lanes = (in_chunk < new) & (at >= 0) & (at < inputs.num_tokens)
    identity = _identity_at(inputs, at, lanes)
    full = tl.load(inputs.out_cache_loc + at, mask=lanes, other=0).to(tl.int64)
    writer = writer_word(report.forward, row, inputs.mode)
    anchor = tl.load(anchors + row)
    slot, reasons = translate(space, full)
    keep = lanes & (reasons == 0)
    # The input words again, at full width: identity keeps 32 bits of each.
    token = tl.load(inputs.input_ids + at, mask=lanes, other=0).to(tl.int64)
    position = tl.load(inputs.positions + at, mask=lanes, other=0).to(tl.int64)
    expected_position = prefix + in_chunk
    expected = known_token(known, index + lane * 0, expected_position, lanes)
    if chain_source is None:
        otherwise = prefix * 0
        if rows.words is not None:
            # Several tokens each without chunks are drafts: only the first one is certain.
            certain = 1 if batch.ext_lens is None else new
            last = lanes & (in_chunk == certain - 1) & (full != 0)
            every = lane >= 0
            UNIFORM: tl.constexpr = batch.ext_lens is None
            remembered = remember(rows, known, index + lane * 0, row + lane * 0, every, UNIFORM)
            follows = remembered.length == prefix
            # One value in all lanes.
            otherwise = max_of(tl.where(follows, remembered.chain, 0), 0)
            sampled = tl.where(follows & lanes & (in_chunk == 0), remembered.sampled, UNKNOWN)
            expected = tl.where(expected == UNKNOWN, sampled, expected)
            check_rows(batch, space, report, k_records, remembered, row, prefix, last)
        before_chunk, readable = _slot_before(batch, space, row, prefix, prefix >= 0)
        seed = _chain_of(k_records, before_chunk, readable, anchor, prefix, otherwise)
        v_seed = seed
        if v_records is not None:
            v_seed = _chain_of(v_records, before_chunk, readable, anchor, prefix, otherwise)
        before, tiles_power = _sum_before(inputs, first, tile, inverse_powers, tile_power, TILE)
        within = cumsum_of(mix64(identity) * inverse_powers)
        chain = powers * ((seed * tiles_power + before) * MULTIPLIER + within)
        if v_records is not None:
            v_chain = powers * ((v_seed * tiles_power + before) * MULTIPLIER + within)
            store_record(v_records, slot, keep, identity, v_chain, writer)
        if rows.words is not None:
            store_rows(rows, report.forward, row, prefix + certain, chain, last)
    else:
        slots_before, readable = _slot_before(
            batch, space, row + lane * 0, expected_position, lanes
        )
        seeds = _chain_of(chain_source, slots_before, readable, anchor, expected_position, 0)
        chain = seeds * MULTIPLIER + mix64(identity)
        if v_records is not None:
            store_record(v_records, slot, keep, identity, chain, writer)
    store_record(k_records, slot, keep, identity, chain, writer)
    _report_inputs(
        inputs,
        at,
        report,
        v_records,
        full,
        slot,
        reasons,
        lanes,
        position,
        expected_position,
        token,
        expected,
        row,
    )
    return sum_of(keep.to(tl.int32), 0)


@jit
def _fresh_words(head, slot, usable, forward):
    """(identity, chain, writer) of HEAD's records of `slot`, readable, and the lanes that this forward wrote."""
    words = head + slot * WORDS
    identity = tl.load(words)
    chain = tl.load(words + CHAIN)
    writer = tl.load(words + WRITER)
    fresh = usable & ((writer & FORWARD_MASK) == (forward & FORWARD_MASK))
    return identity, chain, writer, fresh & (state_of(writer) == LIVE)


@jit
def copy_head(k_head, v_head, k_tail, v_tail, slot, usable, forward):
    """TAIL records of `slot` from HEAD's, where HEAD of this forward wrote them; numbers written, of K and of V."""
    identity, chain, writer, fresh = _fresh_words(k_head, slot, usable, forward)
    v_written = tl.full([], 0, tl.int32)
    if v_head is not None:
        # Loaded before K's are stored: no load is moved across a store.
        v_identity, v_chain, v_writer, v_fresh = _fresh_words(v_head, slot, usable, forward)
        store_record(v_tail, slot, v_fresh, v_identity, v_chain, v_writer)
        v_written = sum_of(v_fresh.to(tl.int32), 0)
    store_record(k_tail, slot, fresh, identity, chain, writer)
    return sum_of(fresh.to(tl.int32), 0), v_written
