"""Fingerprints of K and V bytes in host memory, equal to those of the same bytes on the device."""

from __future__ import annotations

import sys

import numpy as np
import torch

from ..buffer_group import ContentSource
from ..config import ContentMode
from ..host_code import HOST
from ..host_code.twins import SOURCE_COLUMNS
from ..kernels.layout import content_unit, source_key
from ..kernels.reference.content import content_of_records
from ..kernels.reference.hashing import stored_position
from ..pool_patcher.content_layout import row_sources
from ..pool_patcher.errors import UnsupportedPoolError
from ..record import WORD_IDENTITY

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
_UNIT = 4  # bytes
WORDS_AT_ONCE = 1 << 19  # bounds the memory that a fingerprint takes

Sources = tuple[ContentSource, ...]


def sources_of(half: torch.Tensor, layout: str, layers: int, slots: int, page: int) -> Sources:
    """Content sources of one half of a host pool, layer by layer.

    `half`: [layers, slots, ...], [slots, layers, ...] or [pages, layers, page, ...], by `layout`.
    """
    if layout not in LAYOUTS:
        raise UnsupportedPoolError(
            f"host pool layout {layout}: expected one of {', '.join(LAYOUTS)}"
        )
    lead = 0 if layout == "layer_first" else 1
    return row_sources([half.select(lead, layer) for layer in range(layers)], slots, page)


def refuse_unlike(host: Sources, device: Sources) -> None:
    """Raises UnsupportedPoolError if the fingerprint of a slot would differ between host and device."""
    rows = [[source.row_bytes for source in sources] for sources in (host, device)]
    if rows[0] != rows[1] or content_unit(host) != content_unit(device):
        raise UnsupportedPoolError(
            f"the host pool keeps a slot in rows of {rows[0]} bytes, the device in rows of {rows[1]} bytes"
        )


class HostContent:
    """Where the bytes of a host pool's slots lie, and their fingerprints.

    By NumPy: torch takes longer for a few slots.
    """

    def __init__(self, parts: tuple[Sources, ...], mode: ContentMode) -> None:
        self._parts = parts  # keeps the memory alive
        self._mode = mode
        tables = tuple(map(_table_of, parts))
        self._tables = None if any(table is None for table in tables) else tables
        every = [source for sources in parts for source in sources]
        self._slots = min(map(_slots_within, every), default=sys.maxsize)

    def fingerprints(self, slots: np.ndarray, words: np.ndarray) -> np.ndarray:
        """int64[parts, n] that the records `words` int64[n, parts, RECORD_WORDS] of `slots` int64[n] should hold.

        Raises IndexError for slots beyond the pool.
        """
        if self._tables is None:
            parts = enumerate(self._parts)
            return np.stack([self._by_reference(part, slots, words[:, i]) for i, part in parts])
        if self._mode is ContentMode.ALL:
            return self._hash(self._tables, slots, None)
        positions = stored_position(words[:, :, WORD_IDENTITY])
        tables = enumerate(self._tables)
        return np.concatenate([self._hash((t,), slots, positions[:, i]) for i, t in tables])

    def _hash(
        self, tables: tuple[np.ndarray, ...], slots: np.ndarray, sampled_by: np.ndarray | None
    ) -> np.ndarray:
        """int64[tables, n]."""
        found = HOST.fingerprint_rows(tables, slots, self._slots, sampled_by)
        return np.frombuffer(found, dtype=np.int64).reshape(len(tables), len(slots))

    def _by_reference(self, sources: Sources, slots: np.ndarray, words: np.ndarray) -> np.ndarray:
        longest = max((source.row_bytes for source in sources), default=1) // content_unit(sources)
        step = max(1, WORDS_AT_ONCE // max(1, longest))
        parts = [slice(first, first + step) for first in range(0, len(slots), step)]
        found = [
            content_of_records(sources, slots[part], self._mode, words[part]) for part in parts
        ]
        return np.concatenate(found) if found else slots


def _table_of(sources: Sources) -> np.ndarray | None:
    """What `host_code.fingerprint_rows` takes. None: only the reference reads such rows."""
    moved = any(source.run_slots or source.page_table is not None for source in sources)
    if moved or content_unit(sources) != _UNIT:
        return None
    rows = [
        (s.address, s.page_size, s.page_stride, s.token_stride, s.row_bytes // _UNIT, source_key(i))
        for i, s in enumerate(sources)
    ]
    return np.array(rows, dtype=np.int64).reshape(len(rows), SOURCE_COLUMNS)


def _slots_within(source: ContentSource) -> int:
    """How many slots, in whole pages, the memory of `source` holds."""
    storage = source.data.untyped_storage()
    last = source.address - storage.data_ptr() + source.row_bytes
    last += (source.page_size - 1) * source.token_stride  # where page 0 ends
    pages = (storage.nbytes() - last) // max(1, source.page_stride) + 1
    return max(0, pages) * source.page_size
