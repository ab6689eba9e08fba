"""The step observers of a manager, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.kv_canary.runner.step_observer import StepObserver
from sglang.srt.kv_canary.runner.sweep import SweepOrchestrator

if TYPE_CHECKING:
    from sglang.srt.kv_canary.runner.manager import CanaryManager


def build_observers(
    manager: CanaryManager, server_args: Any, model_runner: Any
) -> list[StepObserver]:
    config, observers = manager.config, []
    is_target = manager.identity.role == "target"
    if config.sweep_interval and is_target:
        # Slots of a draft pool that the prefix cache holds may never have been written.
        observers.append(SweepOrchestrator(config, manager.groups, manager.sink))
    if config.perturb_dir:
        from sglang.srt.kv_canary.perturb.observer import PerturbObserver

        observers.append(PerturbObserver(config.perturb_dir, model_runner))
    return observers
