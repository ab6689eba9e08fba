"""The step observers of a manager, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.kv_canary.runner.step_observer import StepObserver

if TYPE_CHECKING:
    from sglang.srt.kv_canary.runner.manager import CanaryManager


def build_observers(
    manager: CanaryManager, server_args: Any, model_runner: Any
) -> list[StepObserver]:
    observers: list[StepObserver] = []
    if manager.config.perturb_dir:
        from sglang.srt.kv_canary.perturb.observer import PerturbObserver

        observers.append(PerturbObserver(manager.config.perturb_dir, model_runner))
    return observers
