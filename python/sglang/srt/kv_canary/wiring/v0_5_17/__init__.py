"""SGLang 0.5.17, the newest release for torch 2.11. It ships a canary of its own, whose seam the plugin takes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from ...runner.ranks import Ranks
from ..from_0_5_17.answers import (
    captured,
    cuts_decode_graphs,
    decode_graphs_of,
    indexer_pool_of,
    server_args,
)
from ..from_0_5_17.pools import PAGE_MAJOR, POOLS, judged
from ..releases import Release, found_later
from ..until_0_5_17.answers import (
    cached_slots,
    namespace_of,
    namespace_of_key,
    pads_to_other_ranks,
    row_of,
    schedulers_here,
)
from .allocator_methods import ALLOCATOR_METHODS, SWA_ALLOCATOR_METHODS

__all__ = ["RELEASE"]


def _tokens_of(request: Any) -> tuple[Sequence[int], int]:
    # As get_fill_ids(), which copies
    tokens = request.full_untruncated_fill_ids
    return tokens, min(request.extend_range.end, len(tokens))


def _cached_slots(tree_cache: Any, tokens: Sequence[int]) -> list[int]:
    return cached_slots(tree_cache, array("q", tokens))


def _ranks_of(model_runner: Any) -> Ranks:
    ranks = model_runner.ps
    return Ranks(ranks.tp_rank, ranks.pp_rank, ranks.dp_rank, ranks.moe_ep_rank)


def _queues_frees(allocator: Any) -> bool:
    # Freed pages are seen in `_release_page_ids`, whichever call frees them.
    return not allocator.is_not_in_free_group or hasattr(allocator, "_release_page_ids")


RELEASE = Release(
    hook_modules=(
        "allocator",
        "v0_5_17.allocator",
        "v0_5_17.context_parallel",
        "from_0_5_17.cuda_graph",
        "v0_5_17.hicache",
        "until_0_5_17.hicache_storage",
        "from_0_5_17.hicache_eviction",
        "last_words",
        "memory",
        "from_0_5_17.small_pool",
        "from_0_5_17.seam",
        "model_runner",
        "v0_5_17.moved_mappings",
        "sampled_tokens",
        "schedule_stream",
        "scheduler",
        "until_0_5_17.rows",
        "from_0_5_17.server_args",
        "v0_5_17.server_args",
        "from_0_5_17.speculative",
        "from_0_5_17.swa_location",
        "token_oracle",
        "v0_5_17.weights",
        "live_questions",
        "server_info",
        "compile_server",
        "farewell",  # after last_words: reports that it triggers come before the last words
        "startup_check",  # last, so that it sees every error
    ),
    has_own_canary=True,
    check=lambda: None,
    served=found_later(__name__, "coverage", "SERVED"),
    known_pools=lambda: {**POOLS, PAGE_MAJOR: judged(PAGE_MAJOR)},
    refusals=found_later(__name__, "refusals", "REFUSALS"),
    install_flags=lambda: None,  # SGLang has them
    row_of=row_of,
    tokens_of=_tokens_of,
    namespace_of=namespace_of,
    namespace_of_key=namespace_of_key,
    cached_slots=_cached_slots,
    ranks_of=_ranks_of,
    allocator_methods=ALLOCATOR_METHODS,
    swa_allocator_methods=ALLOCATOR_METHODS | SWA_ALLOCATOR_METHODS,
    queues_frees=_queues_frees,
    swa_location=torch.int64,
    draft_ids=torch.int64,
    settled=lambda args: args,
    server_args=server_args,
    indexer_pool_of=indexer_pool_of,
    decode_graphs_of=decode_graphs_of,
    captured=captured,
    cuts_decode_graphs=cuts_decode_graphs,
    pads_to_other_ranks=pads_to_other_ranks,
    schedulers_here=schedulers_here,
)
