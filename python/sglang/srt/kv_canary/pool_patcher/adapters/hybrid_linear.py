"""Hybrid pools: full-attention layers in an MHA or MLA pool, the other layers as Mamba / linear states.

The states have no buffer group. A request has one state, which every token overwrites, so no record per token can be
compared with it. `states/` follows them instead.
"""

from __future__ import annotations

from typing import Any

from ..attachment import AttachOptions, PoolAttachment
from .sub_pool import attach_sub_pool


def attach_hybrid_linear(pool: Any, options: AttachOptions) -> PoolAttachment:
    """The group of `full_kv_pool`. A pipeline stage without full-attention layers has no group."""
    return attach_sub_pool(pool, "full_kv_pool", options, options.kind)
