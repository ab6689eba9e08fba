"""The chain of a token list, computed on the host: the value that a cached prefix's records must end with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import record
from ..host_code import HOST
from ..host_code.twins import first_links, powers

__all__ = ["chain_of_tokens", "first_links", "links_of_tokens"]


def chain_of_tokens(tokens: Sequence[int], anchor: int, first: int = 0, count: int = -1) -> int:
    """Chain after the first `count` of `tokens`, all by default, at positions first, first + 1, ...; signed 64 bits.

    `anchor` if there are none.
    """
    return HOST.chain_of_tokens(tokens, anchor, first, count)


def links_of_tokens(
    tokens: Sequence[int], before: int, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(word 0, word 1) int64[n] of the records of `tokens` at positions first, first + 1, ...

    `before`: chain of the token before them. Divided by A^(i+1), each chain is the one before it and its own link: so
    they are sums, multiplied by powers of A. A is odd, so it has an inverse modulo 2^64.
    """
    count = len(tokens)
    factors = powers(count)[1 : count + 1]
    inverses = np.full(count, pow(record.CHAIN_MULTIPLIER, -1, 1 << 64), dtype=np.uint64)
    inverses = np.multiply.accumulate(inverses)
    numbers, positions = np.asarray(tokens, dtype=np.int64), np.arange(first, first + count)
    links = first_links(numbers, positions).view(np.uint64)
    sums = np.cumsum(links * inverses, dtype=np.uint64) + np.uint64(record.to_unsigned64(before))
    return (numbers & 0xFFFFFFFF) | (positions << 32), (sums * factors).view(np.int64)
