"""Which single word of a slot's bytes explains that their fingerprint has changed.

A fingerprint is a sum of words times odd keys, modulo 2^64 (`record.CONTENT_BASE`). If one word alone has changed, each
word has exactly one old value that would explain the difference, and only the right word's fits into a word: for the
others it does so by chance once in 2^32.
"""

from __future__ import annotations

import torch

from ..buffer_group import ContentSource
from ..config import ContentMode
from ..kernels.layout import content_unit
from ..kernels.reference.content import content_fingerprint, word_keys, word_values, words_read

FIELDS = 4  # of a word: source, byte in its row, value now, value before
_NEWTON_STEPS = 4  # 5 bits are right at first, and each step doubles them


def explaining_words(
    sources: tuple[ContentSource, ...],
    mode: ContentMode,
    slots: torch.Tensor,
    written: int,
    most: int,
) -> torch.Tensor:
    """int64[most, FIELDS]: the first words that explain the change alone; source -1 where there are no more.

    `slots` int64[1]. `written`: the fingerprint as it was, signed.
    """
    unit = content_unit(sources)
    delta = content_fingerprint(sources, slots, mode) - written
    tables = []
    for index, source in enumerate(sources):
        words = words_read(source, index, slots, unit, mode)[0]
        now = word_values(source, slots, words[None], unit)[0]
        was = now - delta * _inverse(word_keys(index, words))
        fits = (was >= 0) & (was < 1 << (8 * unit)) & (was != now)
        fits &= words * unit < source.row_bytes
        number = torch.full_like(words, index)
        tables.append(torch.stack([torch.where(fits, number, -1), words * unit, now, was], dim=1))
    table = torch.cat(tables)
    order = torch.where(table[:, 0] >= 0, table[:, 0], len(sources)).argsort(stable=True)
    found = table.index_select(0, order[:most])
    missing = torch.full_like(table[:1], -1).expand(max(0, most - found.shape[0]), FIELDS)
    return torch.cat([found, missing])


def zero_sources(sources: tuple[ContentSource, ...], slots: torch.Tensor) -> torch.Tensor:
    """int64[len(sources)]: 1 where all bytes of the slot are zero, in mode `all`'s words. `slots` int64[1]."""
    unit = content_unit(sources)
    is_zero = []
    for index, source in enumerate(sources):
        words = words_read(source, index, slots, unit, ContentMode.ALL)
        is_zero.append((word_values(source, slots, words, unit) == 0).all(dim=1))
    return torch.cat(is_zero).long()


def _inverse(odd: torch.Tensor) -> torch.Tensor:
    """Multiplicative inverses modulo 2^64 of odd int64 values, by Newton's method (Hensel lifting)."""
    inverse = odd * 3 ^ 2  # right in 5 bits (Montgomery; see Mayer, arXiv 2204.04342)
    for _ in range(_NEWTON_STEPS):
        inverse = inverse * (2 - odd * inverse)
    return inverse
