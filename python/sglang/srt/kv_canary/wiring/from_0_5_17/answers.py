"""What requests, models and model runners of these releases tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["decode_graphs_of", "has_indexer", "server_args", "tokens_of"]


def tokens_of(request: Any) -> Sequence[int]:
    """The tokens that it has computed once its next forward is done."""
    return request.get_fill_ids()


def has_indexer(hf_config: Any) -> bool:
    """Whether the model has sparse MLA attention with an indexer."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return is_deepseek_dsa(hf_config)


def decode_graphs_of(model_runner: Any) -> Any:
    """The graph runner of decode, None without."""
    return model_runner.decode_cuda_graph_runner


def server_args() -> Any:
    """Those of this process, as they were given."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()
