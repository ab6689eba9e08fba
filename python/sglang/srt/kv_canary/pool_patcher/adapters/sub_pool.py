"""Attaches to a pool inside a pool, whatever its class."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...buffer_group import CanaryBufferGroup
from ...pool_kind import PoolKind
from ..api import build_attachment
from ..attachment import AttachOptions, PoolAttachment
from ..errors import UnsupportedPoolError


def attach_sub_pool(
    pool: Any, attribute: str, options: AttachOptions, kind: PoolKind
) -> PoolAttachment:
    """The attachment of `pool.<attribute>`, with at most one group, of `kind`. Refuses a pool without that sub-pool."""
    sub_pool = getattr(pool, attribute, None)
    if sub_pool is None:
        raise UnsupportedPoolError(
            f"{type(pool).__name__}.{attribute}: expected the pool of the {kind.value} slots, got None"
        )
    attachment = build_attachment(sub_pool, dataclasses.replace(options, kind=kind))
    if len(attachment.groups) > 1:
        kinds = [group.kind.value for group in attachment.groups]
        raise UnsupportedPoolError(
            f"{type(pool).__name__}.{attribute} ({type(sub_pool).__name__}) has several slot spaces {kinds}, "
            "expected one"
        )
    return attachment


def as_swa(pool: Any, group: CanaryBufferGroup, window: int) -> CanaryBufferGroup:
    """`group`, addressed through the full-to-SWA mapping of `pool` (int64, one entry per full slot)."""
    mapping = getattr(pool, "full_to_swa_index_mapping", None)
    if mapping is None:
        raise UnsupportedPoolError(
            f"{type(pool).__name__} has no full_to_swa_index_mapping yet, so its SWA slots cannot be found: "
            "attach after the allocator has been built"
        )
    return dataclasses.replace(group, swa_index_lut=mapping, window=window)


def sliding_window_of(pool: Any, options: AttachOptions) -> int:
    """`options.sliding_window_size`. Refused if SGLang does not know it."""
    size = options.sliding_window_size
    if size is None or size < 0:
        raise UnsupportedPoolError(
            f"{type(pool).__name__} needs the model's sliding window to tell evicted slots from lost ones, "
            f"got sliding_window_size={size}"
        )
    return size
