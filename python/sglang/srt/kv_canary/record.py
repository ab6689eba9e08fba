"""The one place that defines the canary record and the violation row.

Triton kernels, the NumPy reference and the reporters all take the layout from here. A record is four little-endian
64-bit words (32 bytes). There is one record per slot, half, and side (HEAD or TAIL).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any

RECORD_WORDS = 4
RECORD_BYTES = 8 * RECORD_WORDS

# Token id (for strided slots `chain_fold`; low 32 bits, signed) and position (high 32 bits)
WORD_IDENTITY = 0
WORD_CHAIN = 1  # chain hash up to and including this token
WORD_CONTENT = 2  # content fingerprint; a freed record keeps its last writer word here
WORD_WRITER = 3  # forward counter (32 bits), request row (20), mode (4), check (4), state (4)

WRITER_ROW_SHIFT = 32
WRITER_MODE_SHIFT = 52
WRITER_CHECK_SHIFT = 56
WRITER_STATE_SHIFT = 60
WRITER_ROW_BITS = 20
WRITER_ROW_MASK = (1 << WRITER_ROW_BITS) - 1
WRITER_MODE_MASK = 0xF
FORWARD_MASK = 0xFFFFFFFF
# Forwards; more than a device's queue holds. A writer further ahead is one of long ago: numbers wrap.
MOST_FORWARDS_QUEUED = 1 << 10
# XOR of the 16 nibbles of every writer word. Not 0, so no word of 16 equal nibbles is valid.
WRITER_NIBBLES = 0x9

_MASK64 = (1 << 64) - 1


class State(IntEnum):
    """State of a record (4 bits of the writer word)."""

    NEVER_WRITTEN = 0
    LIVE = 1
    FREED = 2
    ALLOCATED = 3  # handed out again after a free, not written since
    # Draft pools: the target wrote the slot and the draft model did not; never a fault
    UNFILLED = 4


# XORed into the writer word of a freed record, it gives the word of an allocated one
FREED_TO_ALLOCATED = (State.FREED ^ State.ALLOCATED) * (
    (1 << WRITER_STATE_SHIFT) | (1 << WRITER_CHECK_SHIFT)
)
# The state that backends assume for a damaged writer word
DAMAGED = 0xF


class Mode(IntEnum):
    """The kind of launch that wrote a record (4 bits of the writer word). Values have no gap."""

    NONE = 0
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    TARGET_VERIFY = 4
    DRAFT_EXTEND = 5
    DRAFT_DECODE = 6
    SPLIT_PREFILL = 7
    DLLM_EXTEND = 8
    FREE = 9  # the allocator took the slot back
    CLEAR = 10  # the allocator took every slot back
    ARRIVAL = 11  # not computed here: KV came from another server, or back with a retracted request
    LOADED = 12  # another server or an earlier one wrote it; read from a storage backend


class Reason(IntFlag):
    """Why a slot is reported. One violation row may carry several."""

    NEVER_WRITTEN = 1 << 0
    USE_AFTER_FREE = 1 << 1
    UNWRITTEN_SINCE_ALLOC = 1 << 2
    BAD_STATE = 1 << 3
    POSITION = 1 << 4
    TOKEN = 1 << 5
    CHAIN = 1 << 6
    CONTENT = 1 << 7
    SLOT_OUT_OF_RANGE = 1 << 8
    UNMAPPED_SLOT = 1 << 9
    SWA_EVICTED_IN_WINDOW = 1 << 10
    WRITE_TOKEN = 1 << 11
    WRITE_POSITION = 1 << 12
    DOUBLE_FREE = 1 << 13
    ROW_OUT_OF_RANGE = 1 << 14
    LENGTH_OUT_OF_RANGE = 1 << 15
    WRITE_LOCATION = 1 << 16
    ROW_CHAIN = 1 << 17
    ROW_LENGTH = 1 << 18
    STALE_WEIGHTS = 1 << 19


REASON_HELP: dict[Reason, str] = {
    Reason.NEVER_WRITTEN: "the slot was never written",
    Reason.USE_AFTER_FREE: "the slot was freed before this read",
    Reason.UNWRITTEN_SINCE_ALLOC: "the slot was handed out again and not written since",
    Reason.BAD_STATE: "the record's writer word is damaged, or its state is impossible in this pool",
    Reason.POSITION: "the slot does not hold the position that the request expects",
    Reason.TOKEN: "the slot does not hold the token that the request expects",
    Reason.CHAIN: "the slot does not continue the request's prefix",
    Reason.CONTENT: "the K/V bytes are not those that were written",
    Reason.SLOT_OUT_OF_RANGE: "the slot index lies outside the pool",
    Reason.UNMAPPED_SLOT: "the request's row maps this position to the padding slot 0",
    Reason.SWA_EVICTED_IN_WINDOW: "the full-to-SWA mapping marks a slot inside the window as evicted",
    Reason.WRITE_TOKEN: "the forward was fed a token other than the one listed or sampled for the request",
    Reason.WRITE_POSITION: "the forward was fed a position that does not match the request's length",
    Reason.DOUBLE_FREE: "the slot was freed while it was already free",
    Reason.ROW_OUT_OF_RANGE: "the request row lies outside req_to_token, or is the padding row 0",
    Reason.LENGTH_OUT_OF_RANGE: "the request's length lies outside req_to_token",
    Reason.WRITE_LOCATION: "attention stores the new token in a SWA slot other than the mapped one",
    Reason.ROW_CHAIN: "the request's row leads to a prefix other than the request's",
    Reason.ROW_LENGTH: "the forward was given a length that does not match the request's last forward",
    Reason.STALE_WEIGHTS: "the slot holds KV of other weights: the model was updated without a flush",
}


class Column(IntEnum):
    """Columns of a violation row, `int64[ring capacity, len(Column)]`."""

    SEQUENCE = 0  # device sequence number, from 0
    TAG = 1  # CanaryLaunchTag id
    REASONS = 2
    SLOT = 3  # slot in the pool kind's own slot space
    FULL_SLOT = 4  # what the request's row holds, before any translation
    PREV_SLOT = 5  # predecessor slot, or PREV_ANCHOR / PREV_UNREACHABLE
    EXPECTED_POSITION = 6
    STORED_POSITION = 7
    EXPECTED_TOKEN = 8
    STORED_TOKEN = 9
    EXPECTED_CHAIN = 10
    STORED_CHAIN = 11
    EXPECTED_CONTENT = 12  # fingerprint of the bytes as they are now
    STORED_CONTENT = 13  # fingerprint of the bytes as they were written
    READER_ROW = 14
    READER_FORWARD = 15
    WRITER = 16  # the stored writer word (of the free, when the record is freed)
    LAST_WRITER = 17  # writer word before the free; 0 when the record is not freed
    # For a new token: the SWA slot in which attention stores it, if known in advance
    ATTENTION_SLOT = 18


VIOLATION_COLUMNS = len(Column)

# Row memory: two 64-bit words per request row and group, as left by the row's last forward.
ROW_WORDS = 2
ROW_WORD_LENGTH = 0  # tokens + 1 (low 32 bits), 0: nothing known; forward counter (high 32 bits)
ROW_WORD_CHAIN = 1  # chain of the last of these tokens

UNKNOWN = -(1 << 63)  # a value that this check does not know
PREV_ANCHOR = -1  # the chain starts here, from the request's anchor
PREV_UNREACHABLE = -2  # there is a predecessor, but its record cannot be read: no chain check

# Chain: chain[i] = chain[i-1] * CHAIN_MULTIPLIER + mix(token, position) mod 2^64. Any odd multiplier is invertible;
# this one is 2^64 / golden ratio, the increment of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
CHAIN_MULTIPLIER = 0x9E3779B97F4A7C15
CHAIN_MULTIPLIER_INVERSE = pow(CHAIN_MULTIPLIER, -1, 1 << 64)
# splitmix64's output function (same paper); the increment makes mix(0) non-zero.
MIX_INCREMENT = 0x9E3779B97F4A7C15
MIX_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MIX_MULTIPLIER_2 = 0x94D049BB133111EB
# Content: CONTENT_BASE + sum over sources s and their words j of word * key(s, j), with the odd keys
# key(s, j) = (mix(j) * (mix(s + CONTENT_SOURCE_SALT) | 1)) | 1; any change of one word changes the sum.
CONTENT_SOURCE_SALT = 1 << 40
CONTENT_BASE = 0x243F6A8885A308D3  # first 64 bits of pi's fraction: an all-zero slot has a non-zero fingerprint
SECTOR_BYTES = (
    32  # what content mode `partial` reads of each layer: mix((position << 16) + s) chooses it
)
# Its share of the content budget: scattered reads are expensive (docs/performance.md)
SECTOR_COST_BYTES = 512


def to_signed64(value: int) -> int:
    """Two's complement int64 of `value` mod 2^64."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def to_unsigned64(value: int) -> int:
    """`value` mod 2^64, non-negative."""
    return value & _MASK64


def mix64(value: int) -> int:
    """splitmix64 of a 64-bit integer; non-negative."""
    x = (value + MIX_INCREMENT) & _MASK64
    x = ((x ^ (x >> 30)) * MIX_MULTIPLIER_1) & _MASK64
    x = ((x ^ (x >> 27)) * MIX_MULTIPLIER_2) & _MASK64
    return x ^ (x >> 31)


def pack_identity(token: int, position: int) -> int:
    """Word 0 as a signed int64."""
    return to_signed64((token & 0xFFFFFFFF) | ((position & 0xFFFFFFFF) << 32))


def unpack_identity(word: int) -> tuple[int, int]:
    """(token, position) of word 0."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1), to_unsigned64(word) >> 32


def chain_step(previous: int, token: int, position: int) -> int:
    """Word 1 of the slot that follows `previous`, as a signed int64."""
    mixed = mix64(to_unsigned64(pack_identity(token, position)))
    return to_signed64(to_unsigned64(previous) * CHAIN_MULTIPLIER + mixed)


def chain_fold(chain: int, previous: int, stride: int) -> int:
    """Token field (32 bits, signed) of a slot that stands for `stride` tokens.

    `chain` is that of the slot's last token. `previous` is that of the last token of its predecessor, `stride` tokens
    earlier. chain - previous * A^stride is what the slot's own tokens have added; it is mixed and cut to 32 bits.
    """
    power = pow(CHAIN_MULTIPLIER, stride, 1 << 64)
    mixed = mix64(to_unsigned64(to_unsigned64(chain) - to_unsigned64(previous) * power))
    return to_signed64(mixed << 32) >> 32


def pack_writer(forward: int, row: int, mode: int, state: int) -> int:
    """Word 3 as a signed int64.

    The check nibble (bits 56 to 59) makes the XOR of all 16 nibbles WRITER_NIBBLES. This reveals every flip of one
    bit, and other damage in 15 of 16 cases.
    """
    word = (
        (forward & FORWARD_MASK)
        | ((row & WRITER_ROW_MASK) << WRITER_ROW_SHIFT)
        | ((mode & WRITER_MODE_MASK) << WRITER_MODE_SHIFT)
        | ((state & 0xF) << WRITER_STATE_SHIFT)
    )
    return to_signed64(word | (_xor_of_nibbles(word) ^ WRITER_NIBBLES) << WRITER_CHECK_SHIFT)


def is_writer_intact(word: int) -> bool:
    """Whether the canary writes such a word: the nibbles fit, mode and state are known. False for 0."""
    _, _, mode, state = unpack_writer(word)
    known = mode < len(Mode) and State.NEVER_WRITTEN < state < len(State)
    return known and _xor_of_nibbles(to_unsigned64(word)) == WRITER_NIBBLES


def _xor_of_nibbles(word: int) -> int:
    for bits in (32, 16, 8, 4):
        word ^= word >> bits
    return word & 0xF


def forwards_between(earlier: Any, later: Any) -> Any:
    """How many forwards `later` comes after `earlier`. Each is a number or a writer word: 32 bits of it count."""
    return (later - earlier) & FORWARD_MASK


def unpack_writer(word: int) -> tuple[int, int, int, int]:
    """(forward counter, request row, mode, state) of word 3, intact or not."""
    word = to_unsigned64(word)
    return (
        word & FORWARD_MASK,
        (word >> WRITER_ROW_SHIFT) & WRITER_ROW_MASK,
        (word >> WRITER_MODE_SHIFT) & WRITER_MODE_MASK,
        word >> WRITER_STATE_SHIFT,
    )
