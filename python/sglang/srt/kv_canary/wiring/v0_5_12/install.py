"""Installs the canary once the pools exist."""

from __future__ import annotations

from typing import Any

from ...config import is_asked_for
from ..context import context
from ..hook_spec import HookSpec, HookType
from ..startup_check import verify_scheduler_begun


def _install(_: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER init_memory_pool: the pools exist, no graph is captured yet."""
    if is_asked_for(model_runner.server_args):
        verify_scheduler_begun()
    context.install(server_args=model_runner.server_args, model_runner=model_runner)


HOOKS = (
    HookSpec(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_memory_pool",
        _install,
        HookType.AFTER,
        "any KV slot",
    ),
)
