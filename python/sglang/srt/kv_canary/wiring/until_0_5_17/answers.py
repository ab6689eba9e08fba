"""What requests, prefix caches, arguments and launches of these releases tell."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from ..adapters import shared_key, shared_prefix_key

__all__ = [
    "cached_slots",
    "namespace_of",
    "namespace_of_key",
    "pads_to_other_ranks",
    "row_of",
    "schedulers_here",
]


# A request's row of req_to_token, read in C: a step asks for those of the whole batch.
row_of = attrgetter("req_pool_idx")


def namespace_of(request: Any) -> str | None:
    """LoRA and cache salt."""
    return shared_key(request, request.extra_key)


def namespace_of_key(key: Any) -> str | None:
    return shared_prefix_key(key.extra_key)


def cached_slots(tree_cache: Any, token_ids: Any) -> list[int]:
    """Full slots of the longest cached prefix. `token_ids` are of the type that the release's RadixKey takes."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    found = tree_cache.match_prefix(MatchPrefixParams(key=RadixKey(token_ids)))
    return found.device_indices.tolist()


def pads_to_other_ranks(server_args: Any) -> bool:
    """Whether all ranks agree on batch sizes."""
    from sglang.srt.utils import require_mlp_sync

    return require_mlp_sync(server_args)


def schedulers_here(server_args: Any) -> int:
    """Scheduler processes that this node launches, over all data parallel ranks."""
    from sglang.srt.entrypoints.engine import _calculate_rank_ranges

    pp_ranks, tp_ranks, _, _ = _calculate_rank_ranges(
        server_args.nnodes, server_args.pp_size, server_args.tp_size, server_args.node_rank
    )
    copies = 1 if server_args.enable_dp_attention else server_args.dp_size
    return len(pp_ranks) * len(tp_ranks) * copies
