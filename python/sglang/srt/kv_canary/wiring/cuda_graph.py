"""Hooks on the graph runners. A replay runs the captured launches. A capture after start-up must not check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .context import context
from .guard import guarded
from .hook_spec import HookSpec, HookType


@guarded
def _before_replay(graph_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    manager = context.manager_of(graph_runner.model_runner)
    if manager is not None:
        manager.note_replay(forward_batch.forward_mode.name)


def _around_capture(
    original: Callable[..., Any], graph_runner: Any, *args: Any, **kwargs: Any
) -> Any:
    manager = context.manager_of(graph_runner.model_runner)
    if manager is None:
        return original(graph_runner, *args, **kwargs)
    with manager.disarmed():
        return original(graph_runner, *args, **kwargs)


_RUNNER = "sglang.srt.model_executor.cuda_graph_runner.CudaGraphRunner"
HOOKS = (
    HookSpec(f"{_RUNNER}.replay", _before_replay, HookType.BEFORE, "decode CUDA graphs"),
    HookSpec(f"{_RUNNER}.capture", _around_capture, HookType.AROUND, "decode CUDA graphs"),
)
