"""SGLang 0.5.22 and 0.5.23. What they share with 0.5.21 is taken from there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from ...runner.ranks import Ranks
from ..adapters import shared_key, shared_prefix_key
from ..context import context
from ..from_0_5_17.pools import PAGE_MAJOR, POOLS
from ..from_0_5_21.answers import NOT_BUILT, salted
from ..releases import found_later
from ..v0_5_21 import RELEASE as OF_0_5_21
from .namespace import key_in_chains
from .pools import UNIFIED_POOLS
from .transfers import TRANSFERS
from .unified_allocator_methods import UNIFIED_ALLOCATORS

__all__ = ["RELEASE"]


def _tokens_of(request: Any) -> tuple[Sequence[int], int]:
    # As get_fill_ids(), which copies
    tokens, end = request.full_untruncated_fill_ids, request.extend_end
    return tokens, len(tokens) if end is None else min(end, len(tokens))


def _namespace_of(request: Any) -> str | None:
    key = shared_key(request, key_in_chains(request.extra_key))
    return salted(key, request.cache_salt)


def _namespace_of_key(key: Any) -> str | None:
    return salted(shared_prefix_key(key_in_chains(key.extra_key)), key.cache_salt)


def _cached_slots(tree_cache: Any, tokens: Sequence[int]) -> list[int]:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    prefixes = getattr(context.containment, "prefixes", None)
    key = RadixKey(array("q", tokens), getattr(prefixes, "default_key", None))
    found = tree_cache.match_prefix(MatchPrefixParams(key=key))
    return tree_cache.path_device_indices(found.last_device_node).tolist()


def _ranks_of(_: Any) -> Ranks:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    dp_rank = parallel.dp_rank if parallel.num_dp_ranks > 1 else None
    return Ranks(parallel.tp_rank, parallel.pp_rank, dp_rank, parallel.moe_ep_rank)


def _schedulers_here(_: Any) -> int:
    from sglang.srt.entrypoints.engine import _calculate_rank_ranges
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    pp_ranks, tp_ranks, _, _ = _calculate_rank_ranges(parallel.node_rank)
    copies = 1 if parallel.attn_dp_enabled else parallel.num_dp_ranks
    return len(pp_ranks) * len(tp_ranks) * copies


RELEASE = replace(
    OF_0_5_21,
    hook_modules=(
        "allocator",
        "from_0_5_21.allocator",
        "from_0_5_21.beam_search",
        "from_0_5_21.context_parallel",
        "v0_5_22.dflash",
        "from_0_5_17.cuda_graph",
        "v0_5_22.disaggregation",
        "v0_5_22.kv_checksum",
        "v0_5_22.hicache",
        "v0_5_22.hicache_storage",
        "from_0_5_17.hicache_eviction",
        "v0_5_22.lmcache",
        "last_words",
        "memory",
        "from_0_5_17.small_pool",
        "from_0_5_17.seam",
        "model_runner",
        "v0_5_22.moved_mappings",
        "sampled_tokens",
        "schedule_stream",
        "scheduler",
        "v0_5_22.scheduler",
        "v0_5_22.unified_allocator",
        "v0_5_22.unified_memory",
        "v0_5_22.action",
        "containment.pair_hooks",
        "from_0_5_17.server_args",
        "from_0_5_17.speculative",
        "from_0_5_17.swa_location",
        "token_oracle",
        "v0_5_22.verified_states",
        "from_0_5_21.weights",
        "live_questions",
        "server_info",
        "compile_server",
        "farewell",  # after last_words: reports that it triggers come before the last words
        "startup_check",  # last, so that it sees every error
    ),
    served=found_later(__name__, "coverage", "SERVED"),
    known_pools=lambda: {**POOLS, **UNIFIED_POOLS, PAGE_MAJOR: NOT_BUILT},
    refusals=found_later(__name__, "refusals", "REFUSALS"),
    tokens_of=_tokens_of,
    namespace_of=_namespace_of,
    namespace_of_key=_namespace_of_key,
    cached_slots=_cached_slots,
    ranks_of=_ranks_of,
    allocator_parts=UNIFIED_ALLOCATORS,
    schedulers_here=_schedulers_here,
    transfers=TRANSFERS,
    states=found_later(__name__, "states", "SlotWatch"),
    shares_buffer=attrgetter("enable_unified_memory"),
)
