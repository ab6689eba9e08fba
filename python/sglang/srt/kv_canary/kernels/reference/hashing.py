"""Chain and mixing arithmetic modulo 2^64, on int64 arrays of NumPy or torch."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch

from ... import record

Words = TypeVar("Words", np.ndarray, torch.Tensor)

INCREMENT = record.to_signed64(record.MIX_INCREMENT)
MULTIPLIERS = tuple(map(record.to_signed64, (record.MIX_MULTIPLIER_1, record.MIX_MULTIPLIER_2)))
MULTIPLIER = record.to_signed64(record.CHAIN_MULTIPLIER)
MODES, STATES = len(record.Mode), len(record.State)


def shift_right(x: Words, bits: int) -> Words:
    """Logical right shift (`>>` is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Words) -> Words:
    """`record.mix64` of every element."""
    x = x + INCREMENT
    x = (x ^ shift_right(x, 30)) * MULTIPLIERS[0]
    x = (x ^ shift_right(x, 27)) * MULTIPLIERS[1]
    return x ^ shift_right(x, 31)


def pack_identity(token: Words, position: Words) -> Words:
    """Word 0 of records, from int32 or int64."""
    return (_as_int64(token) & 0xFFFFFFFF) | (_as_int64(position) << 32)


def _as_int64(x: Words) -> Words:
    return x.astype(np.int64, copy=False) if isinstance(x, np.ndarray) else x.long()


def stored_token(identity: Words) -> Words:
    """Token id (signed 32 bits) of word 0."""
    return (identity << 32) >> 32


def stored_position(identity: Words) -> Words:
    return identity >> 32


def state_of(writer: Words) -> Words:
    """State of a record: DAMAGED where the writer word is not one that the canary writes, nor 0."""
    state = shift_right(writer, record.WRITER_STATE_SHIFT)
    mode = (writer >> record.WRITER_MODE_SHIFT) & record.WRITER_MODE_MASK
    known = (_nibbles_off(writer) == 0) & (mode < MODES)
    known &= (state > record.State.NEVER_WRITTEN) & (state < STATES)
    # 0 is NEVER_WRITTEN
    return (state * known + ~known * record.DAMAGED) * (writer != 0)


def with_check_nibble(writer: Words) -> Words:
    """Writer words whose check nibble is still 0."""
    return writer | (_nibbles_off(writer) << record.WRITER_CHECK_SHIFT)


def _nibbles_off(writer: Words) -> Words:
    """What the check nibble of a writer word is off by."""
    for bits in (32, 16, 8, 4):
        writer = writer ^ (writer >> bits)
    return (writer & 0xF) ^ record.WRITER_NIBBLES


def chain_step(previous: Words, identity: Words) -> Words:
    """Chain after the token of `identity`."""
    return previous * MULTIPLIER + mix64(identity)


def chain_fold(chain: Words, previous: Words, stride: int) -> Words:
    """`record.chain_fold` of every element."""
    power = record.to_signed64(record.CHAIN_MULTIPLIER**stride)
    return stored_token(mix64(chain - previous * power))
