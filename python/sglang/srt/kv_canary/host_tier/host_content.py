"""Fingerprints of K and V bytes in host memory, equal to those of the same bytes on the device."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
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
    """Mode `all` in words of 4 bytes. Evenly spaced layers are read at once.

    By NumPy: torch wakes its threads for each short operation.
    """
    numbers = slots.numpy()
    total = np.full(len(numbers), record.to_signed64(record.CONTENT_BASE)).view(np.uint64)
    first = 0
    for layers in _stacks(sources):
        words = layers[0].row_bytes // _UNIT
        keys = _keys(first, len(layers), words)
        first += len(layers)
        step = max(1, WORDS_AT_ONCE // max(1, len(layers) * words))
        for start in range(0, len(numbers), step):
            part = slice(start, start + step)
            products = _rows(layers, numbers[part]).astype(np.uint64)
            products *= keys
            total[part] += products.sum(axis=(0, 2), dtype=np.uint64)
    return torch.from_numpy(total.view(np.int64))


def _stacks(sources: Sources) -> list[Sources]:
    """`sources` as one stack of layers with equal distances in one buffer, or each on its own."""
    shapes = {
        (
            s.data.untyped_storage().data_ptr(),
            s.page_size,
            s.page_stride,
            s.token_stride,
            s.row_bytes,
        )
        for s in sources
    }
    distances = np.unique(np.diff([source.address for source in sources]))
    together = len(shapes) == 1 and len(distances) <= 1
    return [sources] if together else [(source,) for source in sources]


def _rows(layers: Sources, slots: np.ndarray) -> np.ndarray:
    """uint32[layers, n, words of a row]: a copy of the bytes of `slots` int64[n]."""
    source = layers[0]
    storage, page = source.data.untyped_storage(), source.page_size
    _refuse_beyond(layers, slots, storage)
    flat = torch.empty(0, dtype=torch.int32).set_(storage).numpy().view(np.uint32)
    distance = layers[1].address - source.address if len(layers) > 1 else 0
    shape = (len(layers), int(slots.max()) // page + 1, page, source.row_bytes // _UNIT)
    strides = (distance, source.page_stride, source.token_stride, _UNIT)
    first = flat[(source.address - storage.data_ptr()) // _UNIT :]
    whole = np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)
    return whole[:, slots // page, slots % page]


def _refuse_beyond(layers: Sources, slots: np.ndarray, storage: torch.UntypedStorage) -> None:
    """Raises IndexError for slots beyond the pool. A view of NumPy checks no bounds."""
    last = max(layers, key=lambda source: source.address)
    end = last.address - storage.data_ptr() + last.row_bytes
    end += int(last.start_of(slots.max()))
    if slots.min() < 0 or end > storage.nbytes():
        raise IndexError(
            f"kv-canary: expected slots of a host pool of {storage.nbytes()} bytes. Got {slots.min()} to "
            f"{slots.max()}, which end at byte {end}"
        )


@lru_cache(maxsize=4096)
def _keys(first: int, layers: int, words: int) -> np.ndarray:
    """uint64[layers, 1, words]: the keys of sources `first`, `first` + 1, ..., see `record.CONTENT_BASE`."""
    numbers = torch.arange(words)
    keys = torch.stack([word_keys(first + layer, numbers) for layer in range(layers)])
    return keys.numpy().view(np.uint64)[:, None, :]
