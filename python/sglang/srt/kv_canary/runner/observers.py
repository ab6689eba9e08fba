"""The step observers of a manager, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.kv_canary.runner.health import HealthCheck
from sglang.srt.kv_canary.runner.metrics import build_metrics_exporter
from sglang.srt.kv_canary.runner.statistics import StatisticsReporter
from sglang.srt.kv_canary.runner.step_observer import StepObserver
from sglang.srt.kv_canary.runner.swa_divergence import SwaDivergenceReporter
from sglang.srt.kv_canary.runner.sweep import SweepOrchestrator

if TYPE_CHECKING:
    from sglang.srt.kv_canary.runner.manager import CanaryManager


def build_observers(
    manager: CanaryManager, server_args: Any, model_runner: Any
) -> list[StepObserver]:
    """What the flags and settings ask for. Draft runners have no sweep: see SweepOrchestrator."""
    config, groups, sink = manager.config, manager.groups, manager.sink
    role, sweep, health = manager.identity.role, None, None
    observers: list[StepObserver] = []
    if config.sweep_interval and role == "target":
        sweep = SweepOrchestrator(config, groups, sink)
        observers.append(sweep)
    if config.health_check_interval:
        health = HealthCheck(config, groups, sink, role, sweep)
        observers.append(health)
    if config.stats_print_every_n_steps:
        interval = config.stats_print_every_n_steps
        observers.append(StatisticsReporter(interval, groups, sink, role, sweep))
    if config.swa_divergence_stats_interval and role == "target":
        observers.append(SwaDivergenceReporter(config.swa_divergence_stats_interval, groups, sink))
    if server_args.enable_metrics:
        observers.append(build_metrics_exporter(server_args, model_runner, manager, health, sweep))
    if config.perturb_dir:
        from sglang.srt.kv_canary.perturb.observer import PerturbObserver

        observers.append(PerturbObserver(config.perturb_dir, model_runner))
    return observers
