"""Fingerprints of K and V bytes in host memory, equal to those of the same bytes on the device."""

from __future__ import annotations

import torch

from ..buffer_group import ContentSource
from ..config import ContentMode
from ..kernels.layout import content_unit
from ..kernels.reference.content import content_fingerprint
from ..pool_patcher.content_layout import row_sources
from ..pool_patcher.errors import UnsupportedPoolError

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
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
    words = max((source.row_bytes for source in sources), default=1)
    step = max(1, WORDS_AT_ONCE // max(1, words // content_unit(sources)))
    parts = [
        content_fingerprint(sources, part, mode, sampled)
        for part, sampled in zip(slots.split(step), sampled_as.split(step), strict=True)
    ]
    return torch.cat(parts) if parts else slots
