"""Record layout inside the kernels: `record.py` as compile-time constants, its arithmetic, and slot spaces."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from .... import record
from ....record import Mode, Reason, State
from ..jit import jit

WORDS = tl.constexpr(record.RECORD_WORDS)
CHAIN = tl.constexpr(record.WORD_CHAIN)
CONTENT = tl.constexpr(record.WORD_CONTENT)
WRITER = tl.constexpr(record.WORD_WRITER)

ROW_SHIFT = tl.constexpr(record.WRITER_ROW_SHIFT)
ROW_MASK = tl.constexpr(record.WRITER_ROW_MASK)
MODE_SHIFT = tl.constexpr(record.WRITER_MODE_SHIFT)
MODE_MASK = tl.constexpr(record.WRITER_MODE_MASK)
LAST_MODE = tl.constexpr(len(Mode) - 1)
CHECK_SHIFT = tl.constexpr(record.WRITER_CHECK_SHIFT)
STATE_SHIFT = tl.constexpr(record.WRITER_STATE_SHIFT)
FORWARD_MASK = tl.constexpr(record.FORWARD_MASK)
NIBBLES = tl.constexpr(record.WRITER_NIBBLES)
FREED_TO_ALLOCATED = tl.constexpr(record.to_signed64(record.FREED_TO_ALLOCATED))

NEVER_WRITTEN = tl.constexpr(int(State.NEVER_WRITTEN))
LIVE = tl.constexpr(int(State.LIVE))
FREED = tl.constexpr(int(State.FREED))
ALLOCATED = tl.constexpr(int(State.ALLOCATED))
UNFILLED = tl.constexpr(int(State.UNFILLED))
LAST_STATE = tl.constexpr(len(State) - 1)
DAMAGED = tl.constexpr(record.DAMAGED)

UNKNOWN = tl.constexpr(record.UNKNOWN)
PREV_ANCHOR = tl.constexpr(record.PREV_ANCHOR)
PREV_UNREACHABLE = tl.constexpr(record.PREV_UNREACHABLE)

REASON_NEVER_WRITTEN = tl.constexpr(int(Reason.NEVER_WRITTEN))
REASON_USE_AFTER_FREE = tl.constexpr(int(Reason.USE_AFTER_FREE))
REASON_UNWRITTEN_SINCE_ALLOC = tl.constexpr(int(Reason.UNWRITTEN_SINCE_ALLOC))
REASON_BAD_STATE = tl.constexpr(int(Reason.BAD_STATE))
REASON_POSITION = tl.constexpr(int(Reason.POSITION))
REASON_TOKEN = tl.constexpr(int(Reason.TOKEN))
REASON_CHAIN = tl.constexpr(int(Reason.CHAIN))
REASON_CONTENT = tl.constexpr(int(Reason.CONTENT))
REASON_SLOT_OUT_OF_RANGE = tl.constexpr(int(Reason.SLOT_OUT_OF_RANGE))
REASON_UNMAPPED_SLOT = tl.constexpr(int(Reason.UNMAPPED_SLOT))
REASON_SWA_EVICTED_IN_WINDOW = tl.constexpr(int(Reason.SWA_EVICTED_IN_WINDOW))
REASON_WRITE_TOKEN = tl.constexpr(int(Reason.WRITE_TOKEN))
REASON_WRITE_POSITION = tl.constexpr(int(Reason.WRITE_POSITION))
REASON_DOUBLE_FREE = tl.constexpr(int(Reason.DOUBLE_FREE))
REASON_ROW_OUT_OF_RANGE = tl.constexpr(int(Reason.ROW_OUT_OF_RANGE))
REASON_LENGTH_OUT_OF_RANGE = tl.constexpr(int(Reason.LENGTH_OUT_OF_RANGE))
REASON_WRITE_LOCATION = tl.constexpr(int(Reason.WRITE_LOCATION))
REASON_ROW_CHAIN = tl.constexpr(int(Reason.ROW_CHAIN))
REASON_ROW_LENGTH = tl.constexpr(int(Reason.ROW_LENGTH))
REASON_STALE_WEIGHTS = tl.constexpr(int(Reason.STALE_WEIGHTS))

MULTIPLIER = tl.constexpr(record.to_signed64(record.CHAIN_MULTIPLIER))
MULTIPLIER_INVERSE = tl.constexpr(record.to_signed64(record.CHAIN_MULTIPLIER_INVERSE))
MIX_INCREMENT = tl.constexpr(record.MIX_INCREMENT)
MIX_MULTIPLIER_1 = tl.constexpr(record.MIX_MULTIPLIER_1)
MIX_MULTIPLIER_2 = tl.constexpr(record.MIX_MULTIPLIER_2)


@jit
def mix64(x):
    """splitmix64 of int64 lanes, as int64."""
    x = x.to(tl.uint64) + MIX_INCREMENT
    x = (x ^ (x >> 30)) * MIX_MULTIPLIER_1
    x = (x ^ (x >> 27)) * MIX_MULTIPLIER_2
    return (x ^ (x >> 31)).to(tl.int64)


@jit
def pack_identity(token, position):
    return (token.to(tl.int64) & FORWARD_MASK) | (position.to(tl.int64) << 32)


@jit
def token_of(identity):
    """Token id, signed 32 bits, as int64."""
    return (identity << 32) >> 32


@jit
def position_of(identity):
    return identity >> 32


@jit
def _nibbles_off(writer):
    """What the check nibble of a writer word is off by; 0 in words that the canary writes. int32."""
    folded = (writer ^ (writer >> 32)).to(tl.int32)
    folded = folded ^ (folded >> 16)
    folded = folded ^ (folded >> 8)
    return ((folded ^ (folded >> 4)) & 15) ^ NIBBLES


@jit
def raw_state(writer):
    """The state field, which may be damaged."""
    return (writer >> STATE_SHIFT) & 15


@jit
def writer_damage(writer):
    """0 (int32) where check nibble and mode of a writer word are as the canary writes them."""
    mode = (writer >> MODE_SHIFT).to(tl.int32) & MODE_MASK
    return _nibbles_off(writer) | (mode > LAST_MODE).to(tl.int32)


@jit
def state_of(writer):
    """State of a record: DAMAGED where the writer word is not one that the canary writes, nor 0."""
    state = raw_state(writer)
    known = (writer_damage(writer) == 0) & (state > NEVER_WRITTEN) & (state <= LAST_STATE)
    return tl.where(writer == 0, NEVER_WRITTEN, tl.where(known, state, DAMAGED))


@jit
def pack_writer(forward, row, mode, state):
    """`record.pack_writer` of int64 values."""
    word = (forward & FORWARD_MASK) | ((mode & MODE_MASK) << MODE_SHIFT)
    word = word | ((row & ROW_MASK) << ROW_SHIFT) | (state << STATE_SHIFT)
    return word | (_nibbles_off(word).to(tl.int64) << CHECK_SHIFT)


@jit
def writer_word(forward, row, mode):
    """Word 3 of a record that `forward` writes."""
    return pack_writer(forward, row.to(tl.int64), mode.to(tl.int64), LIVE)


@jit
def has_stale_weights(writer, forward, weights_age):
    """Whether a writer word is of a forward before the last weight update."""
    return ((forward - writer) & FORWARD_MASK) >= weights_age


@jit
def state_reasons(state, UNFILLS: tl.constexpr):
    """Reason bits (int32) of a record state; 0 for live. UNFILLS: for unfilled too, which nothing is known of."""
    reasons = tl.where(state == NEVER_WRITTEN, REASON_NEVER_WRITTEN, REASON_BAD_STATE)
    reasons = tl.where(state == FREED, REASON_USE_AFTER_FREE, reasons)
    reasons = tl.where(state == ALLOCATED, REASON_UNWRITTEN_SINCE_ALLOC, reasons)
    if UNFILLS:
        reasons = tl.where(state == UNFILLED, 0, reasons)
    return tl.where(state == LIVE, 0, reasons)


class Space(NamedTuple):
    """The group's slot space, and the way into it from full slots."""

    lut: Any  # None: no translation
    full_limit: Any  # full slots lie below it
    num_slots: Any
    stride: Any  # full slots per slot, compile-time


@jit
def translate(space, full):
    """(slot, reasons) of full slots int64; lanes with reasons have slot 0. Nothing out of range is read."""
    reasons = tl.where((full < 0) | (full >= space.full_limit), REASON_SLOT_OUT_OF_RANGE, 0)
    reasons = tl.where(full == 0, REASON_UNMAPPED_SLOT, reasons)
    safe = tl.where(reasons == 0, full, 0)
    if space.lut is None:
        slot = safe // space.stride
    else:
        fine = reasons == 0
        slot = tl.load(space.lut + safe).to(tl.int64)
        reasons = tl.where(
            fine & ((slot < 0) | (slot >= space.num_slots)), REASON_SLOT_OUT_OF_RANGE, reasons
        )
        reasons = tl.where(fine & (slot == 0), REASON_SWA_EVICTED_IN_WINDOW, reasons)
        slot = tl.where(reasons == 0, slot, 0)
    return slot, reasons


@jit
def half_offset(k_records, v_records):
    """Elements from the K records to the V records."""
    v_records = k_records if v_records is None else v_records
    return (v_records.to(tl.int64) - k_records.to(tl.int64)) // 8


@jit
def store_record(records, slot, keep, identity, chain, writer):
    """Write whole records, with no content fingerprint."""
    words = records + slot * WORDS
    tl.store(words, identity, mask=keep)
    tl.store(words + CHAIN, chain, mask=keep)
    tl.store(words + CONTENT, identity * 0, mask=keep)
    tl.store(words + WRITER, writer, mask=keep)
