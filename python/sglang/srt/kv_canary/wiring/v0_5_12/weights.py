"""The classes that update weights."""

from __future__ import annotations

from ..weights import update_hooks

HOOKS = update_hooks(
    "sglang.srt.managers.scheduler.Scheduler",
    "sglang.srt.model_executor.model_runner.ModelRunner",
)
