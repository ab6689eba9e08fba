"""Fingerprints of K and V bytes in host memory, equal to those of the same bytes on the device."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import record
from ..buffer_group import ContentSource
from ..config import ContentMode
from ..kernels.layout import content_unit
from ..kernels.reference.content import content_fingerprint, word_keys
from ..pool_patcher.content_layout import row_sources
from ..pool_patcher.errors import UnsupportedPoolError

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


def fingerprint(
    sources: Sources, slots: torch.Tensor, mode: ContentMode, sampled_as: torch.Tensor
) -> torch.Tensor:
    """int64[n] of `slots` int64[n], as `kernels` compute it of the device slots `sampled_as` int64[n]."""
    if mode is ContentMode.ALL and content_unit(sources) == _UNIT:
        return _of_whole_rows(sources, slots)
    words = max((source.row_bytes for source in sources), default=1)
    step = max(1, WORDS_AT_ONCE // max(1, words // content_unit(sources)))
    parts = [
        content_fingerprint(sources, part, mode, sampled)
        for part, sampled in zip(slots.split(step), sampled_as.split(step), strict=True)
    ]
    return torch.cat(parts) if parts else slots


def _of_whole_rows(sources: Sources, slots: torch.Tensor) -> torch.Tensor:
    """Mode `all` in words of 4 bytes: about seven times as fast as the general function."""
    total = torch.full_like(slots, record.to_signed64(record.CONTENT_BASE))
    for index, source in enumerate(sources):
        keys = _keys(index, source.row_bytes // _UNIT)
        words = _rows(source, slots).long() & 0xFFFFFFFF
        total += (words * keys).sum(dim=1)
    return total


def _rows(source: ContentSource, slots: torch.Tensor) -> torch.Tensor:
    """int32[n, words of a row]: a copy of the bytes of `slots`."""
    data, page = source.data, source.page_size
    flat = torch.empty(0, dtype=torch.int32).set_(data.untyped_storage())
    first = (data.storage_offset() * data.element_size() + source.offset) // _UNIT
    pages = int(slots.max()) // page + 1 if len(slots) else 0
    shape = (pages, page, source.row_bytes // _UNIT)
    strides = (source.page_stride // _UNIT, source.token_stride // _UNIT, 1)
    return flat.as_strided(shape, strides, first)[slots // page, slots % page]


@lru_cache(maxsize=4096)
def _keys(index: int, words: int) -> torch.Tensor:
    """int64[words]: the keys of a source, see `record.CONTENT_BASE`."""
    return word_keys(index, torch.arange(words))
