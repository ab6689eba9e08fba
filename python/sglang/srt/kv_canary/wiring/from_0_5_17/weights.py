"""The classes that update weights."""

from __future__ import annotations

from typing import Any

from ..hook_spec import HookSpec, HookType
from ..weights import STALE, after_update, around_request


def _after_update(result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    after_update(result, updater.get_model_runner())


_SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


def update_hooks(from_distributed: str) -> tuple[HookSpec, ...]:
    """The hooks. `from_distributed`: the model runner's method that puts weights of a process group in place."""
    methods = [f"update_weights_from_{way}" for way in ("disk", "tensor", "ipc")]
    return (
        *(
            HookSpec(
                f"{_SCHEDULER}.update_weights_from_{way}", around_request, HookType.AROUND, STALE
            )
            for way in ("disk", "tensor", "distributed", "ipc")
        ),
        *(
            HookSpec(f"{_RUNNER}.{method}", _after_update, HookType.AFTER, STALE)
            for method in (*methods, from_distributed)
        ),
    )
