"""Statistics: what the canary did in the last N steps, and how much host time it cost."""

from __future__ import annotations

import logging
from typing import Any

from ..buffer_group import CanaryBufferGroup
from ..pool_kind import Side
from ..reports.event_sink import EventSink
from ..runner.step_observer import Observed, StepObserver, Summary
from ..state import TagCounter
from ..sweep.orchestrator import SweepOrchestrator
from .launch_counts import PER_FORWARD, CountsBetween, tags_of

logger = logging.getLogger(__name__)


class StatisticsReporter(StepObserver):
    """One line and one event every `interval` steps."""

    def __init__(
        self,
        interval: int,
        groups: tuple[CanaryBufferGroup, ...],
        sink: EventSink,
        role: str = "target",
        sweep: SweepOrchestrator | None = None,
    ) -> None:
        self._interval = interval
        self._per_forward = tags_of(groups, PER_FORWARD)
        self._all_tags = tags_of(groups, tuple(Side))
        self._sink = sink
        self._role = role
        self._sweep = sweep
        self._last: Summary | None = None
        self._host_ns = 0

    def on_summary(self, manager: Observed, summary: Summary) -> None:
        if self._last is None:
            self._start_from(manager, summary)
        elif summary.step - self._last.step >= self._interval:
            event = self._event(manager, CountsBetween(self._last, summary))
            self._start_from(manager, summary)
            self._sink.emit(event)
            logger.info("%s", statistics_line(event, self._role))

    def _start_from(self, manager: Observed, summary: Summary) -> None:
        self._last, self._host_ns = summary, manager.clock.spent_ns

    def _event(self, manager: Observed, between: CountsBetween) -> dict[str, Any]:
        """The activity between two summaries. Violations, sweep passes and similar totals count from the start."""
        coverage = between.share(self._per_forward, TagCounter.CHECKED, of=TagCounter.ELIGIBLE)
        host_us = (manager.clock.spent_ns - self._host_ns) / 1000
        return {
            "event": "statistics",
            "from_step": between.earlier.step,
            "to_step": between.later.step,
            "forwards": between.forwards_launched,
            "checked": between.by_tag(self._all_tags, TagCounter.CHECKED),
            "content_checked": between.by_tag(self._all_tags, TagCounter.CONTENT_CHECKED),
            "written": between.by_tag(self._per_forward, TagCounter.WRITTEN),
            "coverage": None if coverage is None else round(coverage, 6),
            "sweep_passes": self._sweep.sweep_passes if self._sweep else 0,
            "violations": manager.violations.reported,
            "moot": manager.violations.moot,
            "overwritten": manager.violations.overwritten,
            "internal_errors": manager.errors.total,
            "host_us_per_step": round(host_us / max(1, between.steps), 1),
        }


def statistics_line(event: dict[str, Any], role: str) -> str:
    """The event as one line of the log."""
    e = event
    checked = " ".join(f"{tag} {count}" for tag, count in e["checked"].items())
    coverage = "none live" if e["coverage"] is None else f"{100 * e['coverage']:.1f} %"
    return (
        f"kv-canary statistics, {role} runner, steps {e['from_step']} to {e['to_step']}, {e['forwards']} forwards: "
        f"slots checked {checked}; coverage {coverage}; host {e['host_us_per_step']} us a step; so far "
        f"{e['sweep_passes']} sweep passes, {e['violations']} violations, {e['moot']} moot, "
        f"{e['overwritten']} ring rows overwritten, {e['internal_errors']} internal errors"
    )
