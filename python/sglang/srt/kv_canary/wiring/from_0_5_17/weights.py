"""The classes that update weights."""

from __future__ import annotations

from typing import Any

from ..context import context
from ..guard import guarded_aside
from ..hook_spec import HookSpec, HookType
from ..weights import STALE, after_ipc_update, after_update, around_request


@guarded_aside
def _after_update(result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    after_update(result, updater.get_model_runner())


@guarded_aside
def _after_ipc_update(result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    after_ipc_update(result, updater.get_model_runner())


@guarded_aside
def _after_session(_: None, updater: Any, *, run_post_load: bool) -> None:
    """AFTER a session of updates. `run_post_load`: nothing was loaded in it. A trainer may have written weights.

    If a load has failed, nobody knows whether anything was written.
    """
    manager = context.manager_of(updater.get_model_runner())
    if not run_post_load or manager is None:
        return
    if context.failed_load:
        manager.note_failed_update()
    else:
        manager.note_weight_update()


@guarded_aside
def _session_begun(result: Any, *_: Any, **__: Any) -> None:
    """AFTER the request that begins a session. SGLang refuses it within another one."""
    if result.success:
        context.failed_load = False


SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


def update_hooks(from_distributed: str) -> tuple[HookSpec, ...]:
    """The hooks. `from_distributed`: the model runner's method that puts weights of a process group in place."""
    after = {
        "update_weights_from_disk": _after_update,
        "update_weights_from_tensor": _after_update,
        "update_weights_from_ipc": _after_ipc_update,
        from_distributed: _after_update,
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


SESSION_HOOKS = (
    HookSpec(f"{SCHEDULER}.begin_weight_update", _session_begun, HookType.AFTER, STALE),
    HookSpec(f"{_RUNNER}.end_weight_update", _after_session, HookType.AFTER, STALE),
)
