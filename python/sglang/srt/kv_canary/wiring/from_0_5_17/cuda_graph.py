"""The graph runners. Prefill runs `model.forward` around its graphs, so its launches are in none of them."""

from __future__ import annotations

from ..cuda_graph import around_capture, compile_hooks, graph_hooks
from ..hook_spec import HookSpec, HookType

_RUNNERS = "sglang.srt.model_executor.runner"

HOOKS = (
    *graph_hooks(f"{_RUNNERS}.decode_cuda_graph_runner.DecodeCudaGraphRunner", "execute"),
    HookSpec(
        f"{_RUNNERS}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.capture",
        around_capture,
        HookType.AROUND,
        "prefill CUDA graphs",
    ),
    *compile_hooks("sglang.srt.compilation.torch_compile_decoration"),
)
