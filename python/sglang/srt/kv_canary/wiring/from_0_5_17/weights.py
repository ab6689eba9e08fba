"""The classes that update weights."""

from __future__ import annotations

from typing import Any

from ..context import context
from ..guard import guarded_aside
from ..hook_spec import HookSpec, HookType
from ..weights import STALE, after_partial_update, after_update, around_request


def _after_update(result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    after_update(result, updater.get_model_runner())


def _after_partial_update(result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    after_partial_update(result, updater.get_model_runner())


@guarded_aside
def _after_session(_: None, updater: Any, *, run_post_load: bool) -> None:
    """AFTER a session of updates. `run_post_load`: nothing was loaded, the trainer has written to the parameters."""
    manager = context.manager_of(updater.get_model_runner())
    if run_post_load and manager is not None:
        manager.note_weight_update()


SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


def update_hooks(from_distributed: str) -> tuple[HookSpec, ...]:
    """The hooks. `from_distributed`: the model runner's method that puts weights of a process group in place."""
    after = {
        "update_weights_from_disk": _after_update,
        "update_weights_from_tensor": _after_partial_update,
        "update_weights_from_ipc": _after_partial_update,
        from_distributed: _after_partial_update,
    }
    return (
        *(
            HookSpec(
                f"{SCHEDULER}.update_weights_from_{way}", around_request, HookType.AROUND, STALE
            )
            for way in ("disk", "tensor", "distributed", "ipc")
        ),
        *(
            HookSpec(f"{_RUNNER}.{method}", hook, HookType.AFTER, STALE)
            for method, hook in after.items()
        ),
    )


SESSION_HOOK = HookSpec(f"{_RUNNER}.end_weight_update", _after_session, HookType.AFTER, STALE)
