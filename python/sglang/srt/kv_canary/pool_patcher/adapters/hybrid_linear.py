"""Hybrid pools: full-attention layers in an MHA or MLA pool, the other layers as Mamba / linear states.

The states are not covered: a request has one state that every token overwrites, so there is no record per token
to compare it with.
"""

from __future__ import annotations

from typing import Any

from ..attachment import AttachOptions, PoolAttachment
from .sub_pool import attach_sub_pool


def attach_hybrid_linear(pool: Any, options: AttachOptions) -> PoolAttachment:
    """The group of `full_kv_pool`; no group on a pipeline stage without full-attention layers."""
    return attach_sub_pool(pool, "full_kv_pool", options, options.kind)
