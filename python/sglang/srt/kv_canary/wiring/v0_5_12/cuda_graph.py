"""The graph runner of decode."""

from __future__ import annotations

from ..cuda_graph import compile_hooks, graph_hooks

_RUNNERS = "sglang.srt.model_executor.cuda_graph_runner"
HOOKS = (
    *graph_hooks(f"{_RUNNERS}.CudaGraphRunner", "replay"),
    *compile_hooks(_RUNNERS),
)
