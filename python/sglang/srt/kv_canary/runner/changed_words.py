"""Which single word of a slot's bytes explains that their fingerprint has changed. Runs on the host.

A fingerprint is a sum of words times odd keys, modulo 2^64 (`record.CONTENT_BASE`). If one word alone has changed, each
word has exactly one old value that would explain the difference, and only the right word's fits into a word: for the
others it does so by chance once in 2^32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import record
from ..buffer_group import ContentSource
from ..config import ContentMode
from ..kernels.layout import content_unit
from ..kernels.reference.content import word_keys, words_read

_NEWTON_STEPS = 4  # 5 bits are right at first, and each step doubles them


@dataclass(frozen=True, slots=True)
class Word:
    """A word that explains the change alone."""

    source: int
    byte: int  # the first one, in the source's row
    now: int  # unsigned, little-endian
    was: int


def row_of(source: ContentSource, slot: int) -> torch.Tensor:
    """uint8[row_bytes]: a view of the bytes of `slot`, on the device."""
    data = source.data
    flat = torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage())
    first = data.storage_offset() * data.element_size() + source.offset
    start = first + source.start_of(slot)
    return flat[start : start + source.row_bytes]


def rows_of(row: torch.Tensor, sources: tuple[ContentSource, ...]) -> tuple[torch.Tensor, ...]:
    """The rows of `sources`, one after the other in `row`."""
    return row.split([source.row_bytes for source in sources])


def explaining_words(
    rows: tuple[torch.Tensor, ...],
    sources: tuple[ContentSource, ...],
    mode: ContentMode,
    position: int,
    written: int,
) -> tuple[Word, ...]:
    """The words of `rows`, each of which explains the change alone. Usually one or none.

    `rows`: uint8[row_bytes] of each source, on the host. `position`, `written`: the record's; the fingerprint as it
    was, signed.
    """
    unit = content_unit(sources)
    now, keys, where = [], [], []
    for index, (source, row) in enumerate(zip(sources, rows, strict=True)):
        words = words_read(source, index, torch.tensor([position]), unit, mode)[0]
        words = words[words * unit < source.row_bytes]
        values = row.long() if unit == 1 else row.view(torch.int32).long() & 0xFFFFFFFF
        now.append(values[words])
        keys.append(word_keys(index, words))
        where.append(torch.stack([torch.full_like(words, index), words * unit], dim=1))
    values, keys = torch.cat(now), torch.cat(keys)
    delta = (values * keys).sum() + record.to_signed64(record.CONTENT_BASE) - written
    was = values - delta * _inverse(keys)
    fits = (was >= 0) & (was < 1 << (8 * unit)) & (was != values)
    found = torch.cat([torch.cat(where), values[:, None], was[:, None]], dim=1)[fits]
    return tuple(Word(*word) for word in found.tolist())


def _inverse(odd: torch.Tensor) -> torch.Tensor:
    """Multiplicative inverses modulo 2^64 of odd int64 values, by Newton's method (Hensel lifting)."""
    inverse = odd * 3 ^ 2  # right in 5 bits (Montgomery; see Mayer, arXiv 2204.04342)
    for _ in range(_NEWTON_STEPS):
        inverse = inverse * (2 - odd * inverse)
    return inverse
