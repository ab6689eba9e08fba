"""Setups that are refused on all releases with SGLang's seam. A family may add its own.

Newer releases have more ways to keep KV. Those that the canary cannot follow are refused.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from ...capacities import MOST_REQUESTS
from ..refusals import COMMON, Refusal, requests_of_rank
from .speculation_refusals import SPECULATION

__all__ = ["SHARED"]

SHARED: tuple[Refusal, ...] = (
    *COMMON,
    Refusal(
        # 0.5.12.post1 never runs more than 4,096 on a rank.
        f"more than {MOST_REQUESTS:,} running requests on one rank",
        lambda args: _most_running(args) > MOST_REQUESTS,
        "batches larger than the kernels accept.",
        f"Set --max-running-requests to {MOST_REQUESTS} or less, times the ranks of data-parallel attention.",
    ),
    Refusal(
        "registered prefix cache",
        lambda args: args.radix_cache_backend is not None,
        "slots that it fills or shares in ways of its own: what it loads has no records.",
        "Remove --radix-cache-backend.",
    ),
    *SPECULATION,
    Refusal(
        "decode context parallelism",
        lambda args: args.dcp_size > 1,
        "slots are numbered across ranks, and each rank stores every dcp-size-th of them at a place of its own.",
        "Remove --dcp-size.",
    ),
    Refusal(
        "context parallelism with prefill CUDA graphs",
        lambda args: (
            args.device == "cuda"
            and args.attn_cp_size > 1
            and _has_prefill_graphs(args.cuda_graph_config)
        ),
        "a graph of a rank's part of the layers: neither it nor its replay knows all tokens whose KV is stored.",
        "Add --disable-prefill-cuda-graph.",
    ),
    Refusal(
        "DSA cache split by layers",
        lambda args: args.enable_dsa_cache_layer_split,
        "slots are spread over ranks, and a slot of one rank stands for tokens of another.",
        "Remove --enable-dsa-cache-layer-split.",
    ),
    Refusal(
        "full prefill CUDA graphs",
        lambda args: args.device == "cuda" and _has_full_prefill_graphs(args.cuda_graph_config),
        "a replay runs no Python around the model, where the canary brackets a prefill and learns its tokens.",
        "Remove --cuda-graph-backend-prefill, or add --disable-prefill-cuda-graph.",
    ),
    Refusal(
        "post-capture KV sizing",
        lambda args: envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get(),
        "the pool gets other buffers after the records are beside it.",
        "Set SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=0. SGLang sets it to 1 for some models where it is unset.",
    ),
    Refusal(
        "shared CUDA graphs",
        lambda args: args.device == "cuda" and envs.SGLANG_ENABLE_CUDA_GRAPH_DEDUP.get(),
        "SGLang replays one graph for several, and does not compare the branches that hold the canary's launches.",
        "Set SGLANG_ENABLE_CUDA_GRAPH_DEDUP=0.",
    ),
    Refusal(
        "FlexKV",
        lambda args: args.enable_flexkv,
        "KV that FlexKV loads into the pool arrives without records.",
        "Remove --enable-flexkv.",
    ),
)


def _most_running(args: Any) -> int:
    """Requests that one rank may run by its arguments. 0: SGLang's own limit, which is 4,096 at most."""
    asked, tokens = requests_of_rank(args) or 0, args.max_total_tokens
    return asked if tokens is None else min(asked, tokens // 2)  # as in its `resolve_max_num_reqs`


def _has_prefill_graphs(config: Any) -> bool:
    """`config`: CudaGraphConfig; None for model_path "dummy", which captures nothing."""
    from sglang.srt.model_executor.cuda_graph_config import Backend

    return config is not None and config.prefill.backend != Backend.DISABLED


def _has_full_prefill_graphs(config: Any) -> bool:
    """`config`: CudaGraphConfig; None for model_path "dummy", which captures nothing."""
    from sglang.srt.model_executor.cuda_graph_config import Backend

    return config is not None and config.prefill.backend == Backend.FULL
