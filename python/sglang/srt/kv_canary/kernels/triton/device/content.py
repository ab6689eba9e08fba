"""Content fingerprints inside the kernels: the hash of a few slots over all content sources of one half.

The sum over words of word * ((m[j] * s) | 1), with m[j] of the word's index and the odd s of the source, is computed
as s * sum(word * m[j]) + sum(word where m[j] is even): one multiplication a word, one more per four words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from .... import record
from ..jit import jit, sum_of
from .record import mix64

# Columns of the source table, int64[sources, TABLE_COLUMNS]
TABLE_COLUMNS = tl.constexpr(8)
ADDRESS = tl.constexpr(0)
PAGE_SIZE = tl.constexpr(1)
PAGE_STRIDE = tl.constexpr(2)
TOKEN_STRIDE = tl.constexpr(3)
ROW_BYTES = tl.constexpr(4)
KEY = tl.constexpr(5)  # odd, of the source's index within its half
INDEX = tl.constexpr(6)  # the source's index within its half
RUN = tl.constexpr(7)  # slots per run << RUN_SHIFT | bytes between runs
RUN_SHIFT = tl.constexpr(40)
_RUN_STRIDE = tl.constexpr((1 << 40) - 1)

_BASE = tl.constexpr(record.to_signed64(record.CONTENT_BASE))
_SECTOR_BYTES = tl.constexpr(record.SECTOR_BYTES)


class Sources(NamedTuple):
    """Content sources of one half."""

    table: Any  # of the half's first source
    size: Any


class Pages(NamedTuple):
    """Where pages lie now, see `PageTable`."""

    entries: Any  # None: pages do not move
    limit: Any


class Shape(NamedTuple):
    """What is known at compile time. Pass it on as it is: assigned to a name, its fields become run-time values."""

    page_size: Any  # slots per page of every source; 0: they differ; -1: and some pages have runs
    unit: Any  # bytes per word
    align: Any  # bytes: every row's start is a multiple
    row_align: Any  # words: every row's length is a multiple
    words: Any  # read of a row at most
    slots: Any  # per fingerprint call
    layers: Any  # sources under way at a time
    quads: Any  # four words each, of one row, under way at a time
    partial: Any  # one sector of each row


class _Rows(NamedTuple):
    """The rows of a few slots in a few sources. Shapes [slots, layers], or [1, layers]."""

    listed: Any  # whether there is such a source
    row_bytes: Any
    key: Any
    start: Any  # address
    skipped: Any  # words before the first one that is read


@jit
def locate(pages, slots, usable, SIZE: tl.constexpr):
    """(places of `slots` in the buffers, `usable` without the slots whose page is unbound). SIZE: slots per page."""
    if pages.entries is None:
        places = slots
    else:
        page = tl.where(usable, slots, 0) // SIZE
        entry = tl.load(pages.entries + page)
        usable = usable & (entry > 0) & (entry < pages.limit)
        places = tl.where(usable, entry * SIZE + slots % SIZE, 0)
    return places, usable


@jit
def _rows_at(sources, first, places, numbers, shape):
    """Rows at `places` [slots, 1] in shape.layers sources from `first` on; `numbers` as in `fingerprint`."""
    layer = first + tl.arange(0, shape.layers)[None, :]
    # Not masked: see forward_kernel._block_at.
    entry = sources.table + tl.minimum(layer, sources.size - 1) * TABLE_COLUMNS
    row_bytes = tl.load(entry + ROW_BYTES).to(tl.int32)
    key = tl.load(entry + KEY)
    start = tl.load(entry + ADDRESS)
    page_stride = tl.load(entry + PAGE_STRIDE)
    if shape.page_size == 1:
        start = start + places * page_stride
    else:
        token_stride = tl.load(entry + TOKEN_STRIDE)
        # 32 bits divide faster, and places fit.
        if shape.page_size <= 0:
            page_size = tl.load(entry + PAGE_SIZE).to(tl.int32)
            page = places.to(tl.int32) // page_size
            place = places.to(tl.int32) - page * page_size
        else:
            page = places.to(tl.int32) // shape.page_size
            place = places.to(tl.int32) - page * shape.page_size
        if shape.page_size < 0:
            packed = tl.load(entry + RUN)
            run_slots = (packed >> RUN_SHIFT).to(tl.int32)
            run = place // run_slots
            place = place - run * run_slots
            start = start + run * (packed & _RUN_STRIDE)
        start = start + page.to(tl.int64) * page_stride + place * token_stride
    skipped = row_bytes * 0
    if shape.partial:
        index = tl.load(entry + INDEX)
        mixed = (mix64((numbers << 16) + index).to(tl.uint64) >> 33).to(tl.int32)
        sectors = tl.maximum((row_bytes + (_SECTOR_BYTES - 1)) // _SECTOR_BYTES, 1)
        skipped = (mixed % sectors) * (_SECTOR_BYTES // shape.unit)
    return _Rows(layer < sources.size, row_bytes, key, start, skipped)


@jit
def fingerprint(sources, places, numbers, usable, shape):
    """Fingerprint int64[shape.slots] of slots at `places`; of slots that are not `usable` nothing is read.

    `numbers`: int64[shape.slots] by which mode `partial` chooses the sectors.
    """
    # Axes: slot, quad, layer, word of the quad. Triton gives neighbouring threads neighbouring quads of a row.
    place = (tl.arange(0, shape.quads)[:, None] * 4 + tl.arange(0, 4)[None, :])[None, :, None, :]
    total = tl.full([shape.slots, shape.quads], 0, tl.int64)
    for first_word in range(0, shape.words, 4 * shape.quads):
        rows = _rows_at(sources, 0, places[:, None], numbers[:, None], shape)
        for first in range(0, sources.size, shape.layers):
            # A turn ahead, so that the words' loads wait for nothing.
            more = _rows_at(sources, first + shape.layers, places[:, None], numbers[:, None], shape)
            word = first_word + place
            if shape.partial:
                word = word + rows.skipped[:, None, :, None]
            words = tl.multiple_of(rows.row_bytes // shape.unit, [shape.row_align, shape.row_align])
            inside = (rows.listed & usable[:, None])[:, None, :, None]
            inside = inside & (word < words[:, None, :, None])
            pointer = rows.start.to(tl.pointer_type(tl.uint32 if shape.unit == 4 else tl.uint8))
            pointer = tl.multiple_of(pointer, [shape.align, shape.align])
            value = tl.load(pointer[:, None, :, None] + word, mask=inside, other=0).to(tl.int64)
            mixed_word = mix64(word.to(tl.int64))
            key = rows.key
            odd = sum_of(value * mixed_word, 3)
            even = sum_of(tl.where((mixed_word & 1) == 0, value, 0), 3)
            total += sum_of(odd * key[:, None, :] + even, 2)
            rows = more
    return sum_of(total, 1) + _BASE
