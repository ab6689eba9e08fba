"""Chain and mixing arithmetic on int64 tensors, modulo 2^64."""

from __future__ import annotations

import torch

from ... import record

INCREMENT = record.to_signed64(record.MIX_INCREMENT)
MULTIPLIERS = tuple(map(record.to_signed64, (record.MIX_MULTIPLIER_1, record.MIX_MULTIPLIER_2)))
MODES, STATES = len(record.Mode), len(record.State)


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's `>>` is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """`record.mix64` of every element, int64."""
    x = x + INCREMENT
    x = (x ^ shift_right(x, 30)) * MULTIPLIERS[0]
    x = (x ^ shift_right(x, 27)) * MULTIPLIERS[1]
    return x ^ shift_right(x, 31)


def pack_identity(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Word 0 of records, int64."""
    return (token.long() & 0xFFFFFFFF) | (position.long() << 32)


def stored_token(identity: torch.Tensor) -> torch.Tensor:
    """Token id (signed 32 bits) of word 0."""
    low = identity & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low)


def stored_position(identity: torch.Tensor) -> torch.Tensor:
    return identity >> 32


def state_of(writer: torch.Tensor) -> torch.Tensor:
    """State of a record: DAMAGED where the writer word is not one that the canary writes, nor 0."""
    state = shift_right(writer, record.WRITER_STATE_SHIFT)
    mode = (writer >> record.WRITER_MODE_SHIFT) & record.WRITER_MODE_MASK
    known = (_nibbles_off(writer) == 0) & (mode < MODES)
    known &= (state > record.State.NEVER_WRITTEN) & (state < STATES)
    state = torch.where(known, state, record.DAMAGED)
    return torch.where(writer == 0, int(record.State.NEVER_WRITTEN), state)


def with_check_nibble(writer: torch.Tensor) -> torch.Tensor:
    """Writer words whose check nibble is still 0."""
    return writer | (_nibbles_off(writer) << record.WRITER_CHECK_SHIFT)


def _nibbles_off(writer: torch.Tensor) -> torch.Tensor:
    """What the check nibble of a writer word is off by."""
    for bits in (32, 16, 8, 4):
        writer = writer ^ (writer >> bits)
    return (writer & 0xF) ^ record.WRITER_NIBBLES


def chain_step(previous: torch.Tensor, identity: torch.Tensor) -> torch.Tensor:
    """Chain after the token of `identity`."""
    return previous * record.to_signed64(record.CHAIN_MULTIPLIER) + mix64(identity)


def chain_fold(chain: torch.Tensor, previous: torch.Tensor, stride: int) -> torch.Tensor:
    """`record.chain_fold` of every element, int64."""
    power = record.to_signed64(record.CHAIN_MULTIPLIER**stride)
    return stored_token(mix64(chain - previous * power))
