"""SGLang 0.5.21, which ships a canary of its own. The plugin takes the seam that calls it.

Its scheduler is close to that of 0.5.22. Its prefix cache still caches running requests in the way of 0.5.17.
"""

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
)
from ..from_0_5_17.pools import PAGE_MAJOR, POOLS, UNIFIED_HYBRID, UNIFIED_MHA
from ..from_0_5_21.allocator_methods import ALLOCATOR_METHODS, SWA_ALLOCATOR_METHODS
from ..from_0_5_21.answers import (
    NOT_BUILT,
    namespace_of,
    namespace_of_key,
    pads_to_other_ranks,
    queues_frees,
    row_of,
    server_args,
    settled,
)
from ..releases import Release, found_later
from ..until_0_5_17.answers import cached_slots

__all__ = ["RELEASE"]


def _tokens_of(request: Any) -> tuple[Sequence[int], int]:
    # As get_fill_ids(), which copies
    tokens, extend = request.full_untruncated_fill_ids, request.extend_range
    return tokens, len(tokens) if extend is None else min(extend.end, len(tokens))


def _cached_slots(tree_cache: Any, tokens: Sequence[int]) -> list[int]:
    return cached_slots(tree_cache, array("q", tokens))


def _ranks_of(_: Any) -> Ranks:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    dp_rank = parallel.dp_rank if parallel.dp_size > 1 else None
    return Ranks(parallel.tp_rank, parallel.pp_rank, dp_rank, parallel.moe_ep_rank)


def _schedulers_here(_: Any) -> int:
    from sglang.srt.entrypoints.engine import _calculate_rank_ranges
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    pp_ranks, tp_ranks, _, _ = _calculate_rank_ranges(parallel.node_rank)
    copies = 1 if parallel.enable_dp_attention else parallel.dp_size
    return len(pp_ranks) * len(tp_ranks) * copies


RELEASE = Release(
    hook_modules=(
        "allocator",
        "from_0_5_21.allocator",
        "from_0_5_21.beam_search",
        "from_0_5_21.context_parallel",
        "from_0_5_17.cuda_graph",
        "v0_5_21.hicache",
        "v0_5_22.hicache_storage",
        "from_0_5_17.hicache_eviction",
        "last_words",
        "memory",
        "from_0_5_17.small_pool",
        "from_0_5_17.seam",
        "model_runner",
        "v0_5_21.moved_mappings",
        "sampled_tokens",
        "schedule_stream",
        "scheduler",
        "v0_5_21.rows",
        "from_0_5_17.server_args",
        "from_0_5_17.speculative",
        "from_0_5_17.swa_location",
        "token_oracle",
        "from_0_5_21.weights",
        "live_questions",
        "server_info",
        "compile_server",
        "farewell",  # after last_words: reports that it triggers come before the last words
        "startup_check",  # last, so that it sees every error
    ),
    has_own_canary=True,
    check=lambda: None,
    served=found_later(__name__, "coverage", "SERVED"),
    # Of unified memory, which is refused
    known_pools=lambda: {**POOLS, UNIFIED_HYBRID: POOLS[UNIFIED_MHA], PAGE_MAJOR: NOT_BUILT},
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
    queues_frees=queues_frees,
    swa_location=torch.int64,
    draft_ids=torch.int64,
    settled=settled,
    server_args=server_args,
    indexer_pool_of=indexer_pool_of,
    decode_graphs_of=decode_graphs_of,
    captured=captured,
    cuts_decode_graphs=cuts_decode_graphs,
    pads_to_other_ranks=pads_to_other_ranks,
    schedulers_here=_schedulers_here,
)
