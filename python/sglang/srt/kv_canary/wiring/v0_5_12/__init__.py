"""SGLang 0.5.12.post1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...runner.ranks import Ranks
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
from .transfers import TRANSFERS

__all__ = ["RELEASE"]


def _check() -> None:
    from .own_canary import refuse_own_canary

    refuse_own_canary()


def _install_flags() -> None:
    from .server_args import install_server_args

    install_server_args()


def _tokens_of(request: Any) -> tuple[Sequence[int], int]:
    tokens = request.fill_ids
    return tokens, len(tokens)


def _cached_slots(tree_cache: Any, tokens: Sequence[int]) -> list[int]:
    return cached_slots(tree_cache, list(tokens))


def _ranks_of(model_runner: Any) -> Ranks:
    runner = model_runner
    return Ranks(runner.tp_rank, runner.pp_rank, runner.dp_rank, runner.moe_ep_rank)


def _queues_frees(allocator: Any) -> bool:
    return not allocator.is_not_in_free_group


def _indexer_pool_of(hf_config: Any) -> str | None:
    from sglang.srt.configs.model_config import is_deepseek_nsa

    return "NSATokenToKVPool" if is_deepseek_nsa(hf_config) else None


def _server_args() -> Any:
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()


def _decode_graphs_of(model_runner: Any) -> Any:
    return model_runner.graph_runner


def _captured(args: Any) -> tuple[int, torch.dtype]:
    sizes = args.cuda_graph_bs or [args.cuda_graph_max_bs or 0]
    return 0 if args.disable_cuda_graph else max(sizes), torch.int32


RELEASE = Release(
    hook_modules=(
        "allocator",
        "v0_5_12.allocator",
        "v0_5_12.cuda_graph",
        "v0_5_12.disaggregation",
        "until_0_5_17.hicache",
        "until_0_5_17.hicache_storage",
        "v0_5_12.lmcache",
        "last_words",
        "memory",
        "v0_5_12.small_pool",
        "v0_5_12.install",
        "model_runner",
        "sampled_tokens",
        "v0_5_12.sampled_tokens",
        "schedule_stream",
        "scheduler",
        "until_0_5_17.rows",
        "v0_5_12.scheduler",
        "v0_5_12.action",
        "v0_5_12.pairs",
        "containment.pair_hooks",
        "v0_5_12.speculative",
        "v0_5_12.swa_location",
        "token_oracle",
        "v0_5_12.token_oracle",
        "v0_5_12.weights",
        "live_questions",
        "server_info",
        "compile_server",
        "farewell",  # after last_words: reports that it triggers come before the last words
        "startup_check",  # last, so that it sees every error
    ),
    has_own_canary=False,
    check=_check,
    served=found_later(__name__, "coverage", "SERVED"),
    known_pools=lambda: None,
    refusals=found_later(__name__, "refusals", "REFUSALS"),
    install_flags=_install_flags,
    row_of=row_of,
    tokens_of=_tokens_of,
    namespace_of=namespace_of,
    namespace_of_key=namespace_of_key,
    cached_slots=_cached_slots,
    ranks_of=_ranks_of,
    allocator_methods=ALLOCATOR_METHODS,
    swa_allocator_methods=ALLOCATOR_METHODS | SWA_ALLOCATOR_METHODS,
    queues_frees=_queues_frees,
    swa_location=torch.int32,
    draft_ids=torch.int32,
    settled=lambda server_args: server_args,
    server_args=_server_args,
    indexer_pool_of=_indexer_pool_of,
    decode_graphs_of=_decode_graphs_of,
    captured=_captured,
    cuts_decode_graphs=lambda args: False,
    pads_to_other_ranks=pads_to_other_ranks,
    schedulers_here=schedulers_here,
    transfers=TRANSFERS,
    states=found_later(__name__, "states", "PoolWatch"),
)
