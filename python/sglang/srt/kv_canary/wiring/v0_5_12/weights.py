"""The classes that update weights."""

from __future__ import annotations

from ..released_memory import release_hooks
from ..weights import update_hooks

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    *update_hooks(_SCHEDULER, "sglang.srt.model_executor.model_runner.ModelRunner"),
    *release_hooks(_SCHEDULER),
)
