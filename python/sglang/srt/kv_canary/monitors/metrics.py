"""Prometheus metrics, through SGLang's own `--enable-metrics`, with its naming and labels.

Every rank exports: each checks its own K/V, so rank 0 must not hide a fault of another rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ..buffer_group import CanaryBufferGroup
from ..pool_kind import Side
from ..runner.arrival_desk import OUTCOMES
from ..runner.damage_desk import AFFECTED, ALLOCATOR_KINDS, DamageDesk
from ..runner.ranks import Ranks
from ..runner.step_observer import Observed, StepObserver, Summary
from ..state import TagCounter
from ..sweep.orchestrator import SweepOrchestrator
from .health import HealthCheck
from .launch_counts import PER_FORWARD, CountsBetween, content_tags, tags_of
from .violation_pairs import violation_pairs

PREFIX = "sglang:kv_canary_"
PUBLISH_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Metric:
    """A time series family. Counter names end in `_total`, as Prometheus requires."""

    name: str  # without PREFIX
    help: str
    labels: tuple[str, ...] = ()  # in addition to SGLang's own and `runner`

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


METRICS: tuple[Metric, ...] = (
    Metric("active", "1 while the KV canary checks forwards.", ("mode", "content")),
    Metric(
        "healthy",
        "1 unless the last health check found that checks did not run, or an internal error happened within 10 minutes "
        "or has stopped the checks.",
    ),
    Metric("internal_errors_total", "Errors of the canary's own host code.", ("where",)),
    Metric("health_failures_total", "Health checks that found that checks did not run."),
    Metric("forwards_total", "Forwards that the canary bracketed, as counted on the device."),
    Metric(
        "violations_total",
        "Failed checks of slots, by reason; one violation may have several.",
        ("reason", "launch_tag"),
    ),
    Metric(
        "last_violation_timestamp_seconds",
        "Unix time at which violations_total last grew; absent until it does.",
        ("reason", "launch_tag"),
    ),
    Metric("moot_total", "Findings in forwards whose request was dead already; dropped."),
    Metric(
        "ring_overwritten_total", "Violation rows overwritten before the host had fetched them."
    ),
    Metric("slots_checked_total", "Slots checked.", ("launch_tag",)),
    Metric("content_checked_total", "Slots whose K/V bytes were re-read.", ("launch_tag",)),
    Metric("slots_written_total", "Records written.", ("launch_tag",)),
    Metric(
        "coverage_ratio",
        "Share of the slots read by forwards that was checked since the last update; the rest is over budget.",
        ("launch_tag",),
    ),
    Metric(
        "content_coverage_ratio",
        "Share of them whose K/V bytes were re-read since the last update; the rest is over the content budget.",
        ("launch_tag",),
    ),
    Metric(
        "arrivals_total",
        "Requests whose KV was not computed here, by what happened to it: checked, taken_over or aborted.",
        ("outcome",),
    ),
    Metric(
        "affected_requests_total",
        "Requests that read damage, with the action abort: aborted, or answered before it was known.",
        ("outcome",),
    ),
    Metric(
        "quarantined_tokens",
        "Cached tokens that were dropped because of damage, and that a running request still holds.",
    ),
    Metric(
        "withheld_slots",
        "Slots that are never handed out again: their bytes changed by themselves twice.",
        ("pool",),
    ),
    Metric("sweep_passes_total", "Completed passes over the prefix cache."),
    Metric("sweep_seconds_total", "Seconds that completed passes took, from first to last chunk."),
    Metric("host_seconds_total", "Host time that the canary spent in the scheduler's thread."),
)


RUNNER = "runner"
_OWN_LABELS = {RUNNER, *(label for metric in METRICS for label in metric.labels)}


def metric_labels(server_args: Any, ranks: Ranks) -> dict[str, Any]:
    """The labels of SGLang's scheduler metrics, for the same rank.

    An extra label by the name of one of ours gets the prefix `exported_`, as Prometheus has it for such a clash.
    """
    from sglang.srt.disaggregation.utils import DisaggregationMode

    labels = {
        "model_name": server_args.served_model_name,
        "engine_type": DisaggregationMode.to_engine_type(server_args.disaggregation_mode),
        "tp_rank": ranks.tp,
        "pp_rank": ranks.pp,
        "moe_ep_rank": ranks.moe_ep,
    }
    if ranks.dp is not None:
        labels["dp_rank"] = ranks.dp
    for name, value in (server_args.extra_metric_labels or {}).items():
        labels[f"exported_{name}" if name in _OWN_LABELS else name] = value
    return labels


class MetricFamilies:
    """The prometheus_client objects. All managers of a process share one set."""

    _instance: MetricFamilies | None = None

    def __init__(self, labelnames: tuple[str, ...], registry: Any | None = None) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR first; with an earlier import, processes would not share values.
        import prometheus_client

        where = {} if registry is None else {"registry": registry}
        self._families: dict[str, Any] = {}
        for metric in METRICS:
            names = (*labelnames, *metric.labels)
            if metric.is_counter:
                family = prometheus_client.Counter(metric.full_name, metric.help, names, **where)
            else:
                family = prometheus_client.Gauge(
                    metric.full_name, metric.help, names, multiprocess_mode="mostrecent", **where
                )
            self._families[metric.name] = family

    @classmethod
    def of_process(cls, labelnames: tuple[str, ...]) -> MetricFamilies:
        if cls._instance is None:
            cls._instance = cls(labelnames)
        return cls._instance

    def child(self, name: str, labels: dict[str, Any]) -> Any:
        """The time series of metric `name` with `labels`."""
        return self._families[name].labels(**labels)


class MetricsExporter(StepObserver):
    """Publishes once in PUBLISH_EVERY_S, from the summary that all observers share."""

    def __init__(
        self,
        groups: tuple[CanaryBufferGroup, ...],
        labels: dict[str, Any],
        families: MetricFamilies,
        health: HealthCheck | None = None,
        sweep: SweepOrchestrator | None = None,
    ) -> None:
        self._per_forward = tags_of(groups, PER_FORWARD)
        self._all_tags = tags_of(groups, tuple(Side))
        self._content_tags = content_tags(groups)
        self._labels = labels
        self._families = families
        self._health = health
        self._sweep = sweep
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}  # of counters, as published
        self._published: Summary | None = None
        self._latest: Summary | None = None
        self._next = 0.0
        sides = PER_FORWARD if sweep is None else tuple(Side)
        if health is not None:
            health.listeners.append(self.publish)
        self._count("forwards_total", 0)  # from the start on: KVCanaryStopped needs to see it grow
        for tag, reason in violation_pairs(groups, sides):
            self._count("violations_total", 0, reason=reason, launch_tag=tag)

    def on_summary(self, manager: Observed, summary: Summary) -> None:
        self._latest = summary
        self._publish_if_due(manager)

    def on_idle(self, manager: Observed) -> bool:
        self._publish_if_due(manager)
        return False

    def on_checks_stopped(self, manager: Observed) -> None:
        if manager.serving:
            self.publish(manager)

    def _publish_if_due(self, manager: Observed) -> None:
        now = time.monotonic()
        if now >= self._next and manager.serving:
            self._next = now + PUBLISH_EVERY_S
            self.publish(manager)

    def publish(self, manager: Observed) -> None:
        """Bring every time series up to date."""
        mode, content = str(manager.config.mode), str(manager.config.content_mode)
        self._set("active", int(manager.armed), mode=mode, content=content)
        self._publish_host(manager)
        checks_run = self._health is None or self._health.healthy
        self._set("healthy", int(checks_run and manager.armed and not manager.errors.recent))
        if self._health is not None:
            self._count("health_failures_total", self._health.failures)
        if self._sweep is not None:
            self._count("sweep_passes_total", self._sweep.sweep_passes)
            self._count("sweep_seconds_total", self._sweep.sweep_seconds)
        if self._latest is not None and self._latest is not self._published:
            self._publish_device(self._latest)
            self._published = self._latest

    def _publish_host(self, manager: Observed) -> None:
        found = manager.violations
        self._count("moot_total", found.moot)
        self._count("ring_overwritten_total", found.overwritten)
        self._count("host_seconds_total", manager.clock.spent_ns / 1e9)
        arrived = {} if manager.arrivals is None else manager.arrivals.outcomes
        for outcome in OUTCOMES:
            self._count("arrivals_total", arrived.get(outcome, 0), outcome=outcome)
        self._publish_action(manager.damage)
        for where, count in manager.errors.by_where.items():
            self._count("internal_errors_total", count, where=where)
        for (tag, reason), count in found.by_tag_and_reason.items():
            pair = {"reason": reason, "launch_tag": tag}
            if self._count("violations_total", count, **pair):
                self._set("last_violation_timestamp_seconds", time.time(), **pair)

    def _publish_action(self, damage: DamageDesk | None) -> None:
        """Zeros without an action, so that every panel has data."""
        for outcome in AFFECTED:
            count = 0 if damage is None else damage.outcomes[outcome]
            self._count("affected_requests_total", count, outcome=outcome)
        self._set("quarantined_tokens", 0 if damage is None else damage.quarantined)
        for kind in ALLOCATOR_KINDS:
            count = 0 if damage is None else damage.withheld[kind]
            self._set("withheld_slots", count, pool=kind)

    def _publish_device(self, summary: Summary) -> None:
        self._count("forwards_total", summary.forward_done)
        for name, tags, counter in (
            ("slots_checked_total", self._all_tags, TagCounter.CHECKED),
            ("content_checked_total", self._all_tags, TagCounter.CONTENT_CHECKED),
            ("slots_written_total", self._per_forward, TagCounter.WRITTEN),
        ):
            for tag in tags:
                self._count(name, int(summary.counters[tag.id, counter]), launch_tag=tag.name)
        if self._published is None:
            return
        between = CountsBetween(self._published, summary)
        for tag in self._per_forward:
            share = between.share((tag,), TagCounter.CHECKED, of=TagCounter.ELIGIBLE)
            if share is not None:
                self._set("coverage_ratio", share, launch_tag=tag.name)
            if share is not None and tag in self._content_tags:
                share = between.share((tag,), TagCounter.CONTENT_CHECKED, of=TagCounter.ELIGIBLE)
                self._set("content_coverage_ratio", share, launch_tag=tag.name)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._families.child(name, {**self._labels, **labels}).set(value)

    def _count(self, name: str, value: float, **labels: str) -> bool:
        """Bring a counter up to `value`, its total so far. Returns whether it grew."""
        key = name, tuple(labels.values())
        growth = value - self._values.get(key, 0)
        # inc(0) as well: a series that exists from the start has a rate, and an alert can tell 0 from absent.
        self._families.child(name, {**self._labels, **labels}).inc(max(0, growth))
        self._values[key] = value
        return growth > 0


def build_metrics_exporter(
    server_args: Any,
    ranks: Ranks,
    role: str,
    groups: tuple[CanaryBufferGroup, ...],
    health: HealthCheck | None,
    sweep: SweepOrchestrator | None,
) -> MetricsExporter:
    """The exporter of one manager of this process."""
    labels = {**metric_labels(server_args, ranks), RUNNER: role}
    families = MetricFamilies.of_process(tuple(labels))
    return MetricsExporter(groups, labels, families, health, sweep)
