"""What requests, models and model runners of these releases tell."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "captured",
    "cuts_decode_graphs",
    "decode_graphs_of",
    "indexer_pool_of",
    "server_args",
]


def indexer_pool_of(hf_config: Any) -> str | None:
    """Name of the pool class with an indexer that SGLang builds for a model, None without."""
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_minimax_sparse

    if is_deepseek_dsa(hf_config):
        return "DSATokenToKVPool"
    return "MiniMaxSparseKVPool" if is_minimax_sparse(hf_config) else None


def decode_graphs_of(model_runner: Any) -> Any:
    """The graph runner of decode, None without."""
    return model_runner.decode_cuda_graph_runner


def captured(args: Any) -> tuple[int, torch.dtype]:
    """Requests in the largest decode graph, 0 without, and the dtype of lengths there."""
    decode = args.cuda_graph_config.decode
    sizes = decode.bs or [decode.max_bs or 0]
    return 0 if decode.backend == "disabled" else max(sizes), torch.int64


def cuts_decode_graphs(args: Any) -> bool:
    """Whether a decode may be several graphs, with work between them that no graph holds."""
    return args.cuda_graph_config.decode.backend not in ("full", "disabled")


def server_args() -> Any:
    """Those of this process, as they were given."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()
