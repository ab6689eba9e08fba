"""The chain of a token list, computed on the host: the value that a cached prefix's records must end with."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .. import record

_MIN_POWERS = 4096
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_INCREMENT = np.uint64(record.MIX_INCREMENT)
_MULTIPLIERS = np.uint64(record.MIX_MULTIPLIER_1), np.uint64(record.MIX_MULTIPLIER_2)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def chain_of_tokens(tokens: Sequence[int], anchor: int, first: int = 0) -> int:
    """Chain after `tokens` at positions first, first + 1, ..., signed 64 bits; `anchor` if there are none.

    chain = anchor A^n + sum over i of mix(token[i], first + i) A^(n-1-i), see `record`.
    """
    count = len(tokens)
    if not count:
        return anchor
    powers = _powers(max(_MIN_POWERS, 1 << count.bit_length()))
    numbers = np.array(array("q", tokens), dtype=np.int64)  # numpy takes longer for a list
    links = first_links(numbers, np.arange(first, first + count)).view(np.uint64)
    carried = record.to_unsigned64(anchor) * int(powers[count])
    return record.to_signed64(carried + int(np.dot(links, powers[count - 1 :: -1])))


def links_of_tokens(
    tokens: Sequence[int], before: int, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(word 0, word 1) int64[n] of the records of `tokens` at positions first, first + 1, ...

    `before`: chain of the token before them. Divided by A^(i+1), each chain is the one before it and its own link: so
    they are sums, multiplied by powers of A. A is odd, so it has an inverse modulo 2^64.
    """
    count = len(tokens)
    powers = _powers(max(_MIN_POWERS, 1 << count.bit_length()))[1 : count + 1]
    inverses = np.full(count, pow(record.CHAIN_MULTIPLIER, -1, 1 << 64), dtype=np.uint64)
    inverses = np.multiply.accumulate(inverses)
    numbers, positions = np.asarray(tokens, dtype=np.int64), np.arange(first, first + count)
    links = first_links(numbers, positions).view(np.uint64)
    sums = np.cumsum(links * inverses, dtype=np.uint64) + np.uint64(record.to_unsigned64(before))
    return (numbers & 0xFFFFFFFF) | (positions << 32), (sums * powers).view(np.int64)


def first_links(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64[n]: the chain one step after 0, for int64[n] `tokens` and `positions`."""
    identity = tokens.view(np.uint64) & _LOW
    identity |= positions.view(np.uint64) << _HALF
    _mix64(identity)
    return identity.view(np.int64)


def _mix64(x: np.ndarray) -> None:
    """`record.mix64` of every element, in place: each new array costs a short list as much as the arithmetic."""
    x += _INCREMENT
    shifted = x >> _SHIFTS[0]
    x ^= shifted
    x *= _MULTIPLIERS[0]
    x ^= np.right_shift(x, _SHIFTS[1], out=shifted)
    x *= _MULTIPLIERS[1]
    x ^= np.right_shift(x, _SHIFTS[2], out=shifted)


@lru_cache
def _powers(count: int) -> np.ndarray:
    """uint64[count + 1] of powers of the chain's multiplier."""
    powers = np.full(count + 1, record.CHAIN_MULTIPLIER, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)
