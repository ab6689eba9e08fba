"""Which part of a token's K and V a rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..buffer_group import CanaryBufferGroup
from ..config import ContentMode
from .refusals import attention_groups


def attention_ranks(server_args: Any) -> int:
    """Ranks that share the KV heads of a request."""
    return server_args.tp_size // attention_groups(server_args)


def own_content_budget(
    budget: int,
    mode: ContentMode,
    groups: Iterable[CanaryBufferGroup],
    server_args: Any,
    model_config: Any,
) -> int:
    """A rank's share of `budget` bytes, with which a forward re-reads as many tokens as on one rank.

    All of it where ranks hold the same (latent rows have no heads), and of sectors, which have one size.
    """
    ranks = attention_ranks(server_args)
    has_heads = all(group.v_head is not None for group in groups)
    if ranks == 1 or mode is not ContentMode.ALL or not has_heads:
        return budget
    own, total = model_config.get_num_kv_heads(ranks), model_config.get_total_num_kv_heads()
    return max(1, budget * own // total)
