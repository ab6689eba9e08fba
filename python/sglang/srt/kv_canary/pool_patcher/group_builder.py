"""Allocates the records of one slot space and builds its group."""

from __future__ import annotations

from typing import Any

from ..buffer_group import CanaryBufferGroup, ContentSource
from ..pool_kind import PoolKind, Side
from .attachment import AttachOptions
from .buf_info_splice import BufInfoSplice
from .buffer_allocation import alloc_canary_buf


def build_group(
    kind: PoolKind,
    num_slots: int,
    device: Any,
    options: AttachOptions,
    k_content: tuple[ContentSource, ...],
    v_content: tuple[ContentSource, ...] | None = None,
) -> CanaryBufferGroup:
    """A group with fresh records of `num_slots` slots; it has a V half unless `v_content` is None."""

    def records():
        return alloc_canary_buf(num_slots, device)

    has_v = v_content is not None
    return CanaryBufferGroup(
        kind,
        k_head=records(),
        k_tail=records(),
        v_head=records() if has_v else None,
        v_tail=records() if has_v else None,
        kv_token_id_vs_position_offset=options.token_offset,
        k_content=k_content if options.content else (),
        v_content=v_content if options.content and has_v else (),
    )


def splice_halves(
    group: CanaryBufferGroup, layers: int, page_size: int, start: int = 0
) -> tuple[BufInfoSplice, ...]:
    """Splices for a list with `layers` buffers per half of `group`, K first, from index `start` on."""
    return tuple(
        BufInfoSplice(
            start + layers * i,
            start + layers * (i + 1),
            group.records(half, Side.HEAD),
            group.records(half, Side.TAIL),
            page_size,
        )
        for i, half in enumerate(group.halves)
    )
