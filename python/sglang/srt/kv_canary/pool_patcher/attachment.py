"""What an attacher receives and returns. `api` applies the result to the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..buffer_group import CanaryBufferGroup
from ..pool_kind import PoolKind
from .buf_info_splice import BufInfoSplice

KV_BUF_INFOS = "get_contiguous_buf_infos"
STATE_BUF_INFOS = "get_state_buf_infos"


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """How to protect a pool."""

    content: bool  # whether the groups get content sources
    allocator: Any = None  # the pool's token_to_kv_pool_allocator
    token_offset: int = 0  # kv_token_id_vs_position_offset of the groups
    sliding_window_size: int | None = None  # ModelRunner.sliding_window_size
    kind: PoolKind = PoolKind.FULL  # for a pool with a single slot space


@dataclass(frozen=True, slots=True)
class PoolAttachment:
    """An attacher's result: the groups of a pool, and the buffer lists that name their records.

    Building it changes nothing in the pool. `splices` maps a method name of the pool to the record buffers that
    surround parts of its lists.
    """

    groups: tuple[CanaryBufferGroup, ...] = ()
    splices: dict[str, tuple[BufInfoSplice, ...]] = field(default_factory=dict)


PoolAttacher = Callable[[Any, AttachOptions], PoolAttachment]
