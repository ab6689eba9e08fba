"""What an attacher is given and what it hands back; applying it to the pool is the api's business."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..buffer_group import CanaryBufferGroup, PoolKind
from .buf_info_splice import BufInfoSplice

KV_BUF_INFOS = "get_contiguous_buf_infos"
STATE_BUF_INFOS = "get_state_buf_infos"


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """How a pool is to be protected."""

    content: bool  # whether the groups get content sources
    allocator: Any = None  # the pool's token_to_kv_pool_allocator
    token_offset: int = 0  # kv_token_id_vs_position_offset of the groups
    sliding_window_size: int | None = None  # ModelRunner.sliding_window_size
    kind: PoolKind = PoolKind.FULL  # of a pool that has one slot space only


@dataclass(frozen=True, slots=True)
class PoolAttachment:
    """An attacher's result: the groups of a pool, and which buffer lists name their records.

    Building it changes nothing in the pool. `splices` maps a method name of the pool to the record buffers
    that go around parts of the lists it returns.
    """

    groups: tuple[CanaryBufferGroup, ...] = ()
    splices: dict[str, tuple[BufInfoSplice, ...]] = field(default_factory=dict)


PoolAttacher = Callable[[Any, AttachOptions], PoolAttachment]
