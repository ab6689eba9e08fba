"""The step observers of a manager, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .monitors.health import HealthCheck
from .monitors.metrics import build_metrics_exporter
from .monitors.statistics import StatisticsReporter
from .monitors.swa_divergence import SwaDivergenceReporter
from .runner.step_observer import StepObserver
from .sweep.cached_ends import CachedEnds
from .sweep.orchestrator import SweepOrchestrator
from .wiring.cached_ends import InsertWatch
from .wiring.releases import release
from .wiring.startup_check import AppliedHooks

if TYPE_CHECKING:
    from .runner.manager import CanaryManager
    from .runner.ranks import Ranks


def build_observers(
    manager: CanaryManager, server_args: Any, model_runner: Any, ranks: Ranks
) -> list[StepObserver]:
    """The observers that flags and settings ask for. Draft runners have no sweep: see SweepOrchestrator."""
    config, groups, sink = manager.config, manager.groups, manager.sink
    role, sweep, health = manager.identity.role, None, None
    observers: list[StepObserver] = []
    if config.sweep_interval and role == "target":
        namespace_of = release().namespace_of_key
        ends = CachedEnds()
        sweep = SweepOrchestrator(config, groups, sink, namespace_of, ends)
        observers += [InsertWatch(ends), sweep]
    if config.health_check_interval:
        health = HealthCheck(config, groups, sink, role, sweep, _lost_hooks(role))
        observers.append(health)
    if config.stats_print_every_n_steps:
        interval = config.stats_print_every_n_steps
        observers.append(StatisticsReporter(interval, groups, sink, role, sweep))
    if config.swa_divergence_stats_interval and role == "target":
        observers.append(SwaDivergenceReporter(config.swa_divergence_stats_interval, groups, sink))
    if server_args.enable_metrics:
        observers.append(build_metrics_exporter(server_args, ranks, role, groups, health, sweep))
    if config.perturb_dir:
        from .perturb.observer import PerturbObserver

        observers.append(PerturbObserver(config.perturb_dir, model_runner, ranks))
    return observers


def _lost_hooks(role: str) -> Callable[[], list[str]]:
    """The target's runner says it for the process."""
    applied = AppliedHooks()

    def lost() -> list[str]:
        missing = applied.missing() if role == "target" else ()
        lost = (f"{hook.target} no longer calls the canary ({hook.protects})" for hook in missing)
        return list(dict.fromkeys(lost))

    return lost
