"""Work items that write a tile of a chunk of one request."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ..jit import cumsum_of, jit, max_of, sum_of
from .record import (
    MULTIPLIER,
    MULTIPLIER_INVERSE,
    UNKNOWN,
    mix64,
    store_record,
    translate,
    writer_word,
)
from .rows import check_rows, remember, store_rows
from .spans import known_token
from .writes import Tokens, chain_of, identity_at, report_inputs, slot_before, token_at


class Powers(NamedTuple):
    """Powers of the chain's multiplier A, int64."""

    lane: Any  # A ** lane, of the lanes of a tile
    inverse: Any  # A ** -lane
    tile: Any  # A ** (tokens of a tile)


@jit
def _lane_powers(base, BITS: tl.constexpr):
    """(base ** lane of 2 ** BITS lanes, base ** (2 ** BITS))."""
    lane = tl.arange(0, 2**BITS)
    power = tl.full([2**BITS], 1, tl.int64)
    square = tl.full([], base, tl.int64)
    for bit in tl.static_range(BITS):
        power = tl.where(((lane >> bit) & 1) != 0, power * square, power)
        square = square * square
    return power, square


@jit
def powers_of(TILE_BITS: tl.constexpr):
    """The powers for tiles of 2 ** TILE_BITS tokens."""
    powers, tile_power = _lane_powers(MULTIPLIER, TILE_BITS)
    inverse_powers, _ = _lane_powers(MULTIPLIER_INVERSE, TILE_BITS)
    return Powers(powers, inverse_powers, tile_power)


@jit
def _sum_before(inputs, first, tile, powers, TILE: tl.constexpr):
    """(sum over the j tokens before a tile of A^(j-1-i) mix[i], A^j), four tiles a turn: their loads overlap."""
    lane = tl.arange(0, TILE)
    sums = tl.full([TILE], 0, tl.int64)
    tile_power = powers.tile
    power = tile_power * 0 + 1
    size = inputs.num_tokens
    for group in range(0, tile, 4):
        at_0 = first + group * TILE + lane
        at_1 = at_0 + TILE
        at_2 = at_1 + TILE
        at_3 = at_2 + TILE
        identity_0 = identity_at(inputs, at_0, (at_0 >= 0) & (at_0 < size))
        identity_1 = identity_at(inputs, at_1, (at_1 >= 0) & (at_1 < size) & (group + 1 < tile))
        identity_2 = identity_at(inputs, at_2, (at_2 >= 0) & (at_2 < size) & (group + 2 < tile))
        identity_3 = identity_at(inputs, at_3, (at_3 >= 0) & (at_3 < size) & (group + 3 < tile))
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
    return sum_of(sums * powers.inverse, 0) * tile_power * MULTIPLIER_INVERSE, power


@jit
def write_tile(launch, powers, index, tile, TILE: tl.constexpr):
    """Chain and write tokens tile * TILE .. of request `index`, which is valid; number written.

    With c the chain before the tile, chain[i] = A^i (A c + sum over j <= i of A^-j mix[j]): two vectors of powers
    and a prefix sum. c needs the mixes of the chunk's earlier tiles, which the program reads again: no program waits
    for another.
    """
    batch, inputs, rows, records = launch.batch, launch.inputs, launch.rows, launch.records
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
    identity = identity_at(inputs, at, lanes)
    full = tl.load(inputs.out_cache_loc + at, mask=lanes, other=0).to(tl.int64)
    writer = writer_word(launch.report.forward, row, inputs.mode)
    anchor = tl.load(launch.anchors + row)
    slot, reasons = translate(launch.space, full)
    keep = lanes & (reasons == 0)
    # The input words again, at full width: identity keeps 32 bits of each.
    token = token_at(inputs, at, lanes)
    position = tl.load(inputs.positions + at, mask=lanes, other=0).to(tl.int64)
    tokens = Tokens(at, index, lanes, row, prefix, token, position, full, anchor)
    expected_position = prefix + in_chunk
    expected = known_token(launch.known, index, expected_position, lanes)
    if records.source is None:
        otherwise = prefix * 0
        if rows.words is not None:
            # Several tokens each without chunks are drafts: only the first one is certain.
            certain = 1 if batch.ext_lens is None else new
            last = lanes & (in_chunk == certain - 1) & (full != 0)
            every = lane >= 0
            UNIFORM: tl.constexpr = batch.ext_lens is None
            remembered = remember(
                rows, launch.known, index + lane * 0, row + lane * 0, every, UNIFORM
            )
            follows = remembered.length == prefix
            # One value in all lanes. Not of several tiles: another program may store the row while this one reads it.
            otherwise = max_of(tl.where(follows & (new <= TILE), remembered.chain, 0), 0)
            sampled = tl.where(follows & lanes & (in_chunk == 0), remembered.sampled, UNKNOWN)
            expected = tl.where(expected == UNKNOWN, sampled, expected)
            check_rows(launch, remembered, row, prefix, last)
        before_chunk, readable = slot_before(launch, row, prefix, prefix >= 0)
        seed = chain_of(records.k, before_chunk, readable, anchor, prefix, otherwise)
        v_seed = seed
        if records.v is not None:
            v_seed = chain_of(records.v, before_chunk, readable, anchor, prefix, otherwise)
        before, tiles_power = _sum_before(inputs, first, tile, powers, TILE)
        within = cumsum_of(mix64(identity) * powers.inverse)
        chain = powers.lane * ((seed * tiles_power + before) * MULTIPLIER + within)
        if records.v is not None:
            v_chain = powers.lane * ((v_seed * tiles_power + before) * MULTIPLIER + within)
            store_record(records.v, slot, keep, identity, v_chain, writer)
        if rows.words is not None:
            store_rows(rows, launch.report.forward, row, prefix + certain, chain, last)
    else:
        slots_before, readable = slot_before(launch, row + lane * 0, expected_position, lanes)
        seeds = chain_of(records.source, slots_before, readable, anchor, expected_position, 0)
        chain = seeds * MULTIPLIER + mix64(identity)
        if records.v is not None:
            store_record(records.v, slot, keep, identity, chain, writer)
    store_record(records.k, slot, keep, identity, chain, writer)
    report_inputs(launch, tokens, slot, reasons, expected_position, expected)
    return sum_of(keep.to(tl.int32), 0)
