"""Prefills with context parallelism: a rank computes a part of the new tokens, and stores K and V of all of them.

SGLang's eager runner splits the batch and runs the layers without `model.forward`, so the bracket is put around that.
The batch is whole there: the split tokens and positions go to the layers, and the batch keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..hook_spec import HookSpec, HookType
from ..model_forward import surrounded

__all__ = ["context_parallel_hooks"]


def _around_parts(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    with surrounded(runner.model_runner.model, forward_batch):
        return original(runner, forward_batch, *args, **kwargs)


def context_parallel_hooks(method: str) -> tuple[HookSpec, ...]:
    """`method` of SGLang's eager runner: computes a rank's part of a prefill."""
    runner = "sglang.srt.model_executor.runner.eager_runner.EagerRunner"
    lost = "prefills with context parallelism"
    return (HookSpec(f"{runner}.{method}", _around_parts, HookType.AROUND, lost),)
