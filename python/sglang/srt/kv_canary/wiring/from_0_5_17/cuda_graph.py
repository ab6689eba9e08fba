"""The graph runner of decode."""

from __future__ import annotations

from ..cuda_graph import graph_hooks

HOOKS = graph_hooks(
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner", "execute"
)
