"""The health check: a checker that has silently stopped is worse than none.

In every period it reads the device's own counters, which only kernels change: what has run since the last check?
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ..buffer_group import CanaryBufferGroup
from ..config import CanaryConfig, CanaryMode, ContentMode
from ..endpoint import CanaryLaunchTag
from ..errors import CanaryHealthError
from ..listeners import tell_all
from ..pool_kind import PoolKind, Side
from ..reports.event_sink import EventSink
from ..reports.violation_reporter import leave_last_words
from ..runner.step_observer import Observed, StepObserver, Summary
from ..state import TagCounter
from ..sweep.orchestrator import SweepOrchestrator
from .launch_counts import PER_FORWARD, CountsBetween, content_tags, tags_of

logger = logging.getLogger(__name__)

UNHEALTHY = "kv-canary unhealthy"  # so begins the text of an error
SILENT_PERIODS = 2  # without counters from the device; only steps with forwards count
MIN_SILENT_STEPS = 64
MAX_UNDER_WAY = 1  # forwards whose HEAD has run and TAIL has not, at the time of the copy


class HealthCheck(StepObserver):
    """Checks once in `health_check_interval` steps. An idle tick of the scheduler counts as a step.

    These must have run since the last check:
    - HEAD and TAIL of every group and half, if forwards were launched;
    - the content fingerprints of what they wrote;
    - every SWEEP launch that was issued (none without `sweep`, so none on draft runners).

    SGLang must still call every hook: another package may replace a function while the server serves.
    The device must have counted as many forwards as the host launched. An idle server owes nothing. If a check fails,
    RAISE raises CanaryHealthError. LOG logs an error, emits an event and clears `healthy`.
    """

    def __init__(
        self,
        config: CanaryConfig,
        groups: tuple[CanaryBufferGroup, ...],
        sink: EventSink,
        role: str = "target",
        sweep: SweepOrchestrator | None = None,
        lost_hooks: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`lost_hooks`: what SGLang does not call any more, as text."""
        self._config = config
        self._groups = groups
        self._tags = tags_of(groups, PER_FORWARD)
        self._sink = sink
        self._role = role
        self._sweep = sweep
        self._lost_hooks = lost_hooks
        self._last: Summary | None = None
        # Forwards that the device counted beyond the host's launches, as last reported.
        self._ahead = 0
        self._slack = 0  # the part of it that may come from a late copy at the start
        self._doubted = False  # the last check saw another number, which a late copy can explain
        # Tags whose fingerprints were due when the last copy was made: the next one has them
        self._due: set[CanaryLaunchTag] = set()
        self._ticks = 0
        self._checked_tick = 0
        self._longest_silence = max(
            MIN_SILENT_STEPS, SILENT_PERIODS * config.health_check_interval
        )  # in steps with forwards
        self._unheard_steps = 0  # steps with forwards since the last counters; idle ticks copy none
        self._heard = time.monotonic()  # time of the last counters
        self._sweeps_issued: dict[PoolKind, int] = {}  # as of the previous summary
        self._sweeps_checked: dict[PoolKind, int] = {}  # as of the last check
        self.healthy = True
        self.checks = 0
        self.failures = 0
        # Called when a check has failed. Counters, with which others come, may have stopped
        self.listeners: list[Callable[[Observed], object]] = []

    def after_forwards(self, manager: Observed) -> None:
        self._ticks += 1
        self._unheard_steps += 1
        if self._unheard_steps <= self._longest_silence or not manager.armed:
            return
        if time.monotonic() - self._heard > 2 * self._config.copy_every_s:
            silent, self._unheard_steps = self._unheard_steps, 0
            problem = f"no counters have arrived from the device for {silent} steps"
            self._conclude(manager, [problem], ())

    def on_unseen_forwards(self, manager: Observed, results: int) -> None:
        problem = f"no forward was seen before the last {results} results"
        self._conclude(manager, [problem, *self._lost_hooks()], ())

    def on_checks_stopped(self, manager: Observed) -> None:
        """Lost hooks may be the reason, and no period ends from now on."""
        if self.healthy and (problems := [*self._lost_hooks()]):
            self._conclude(manager, problems, ())

    def on_idle(self, manager: Observed) -> bool:
        self._ticks += 1
        return False

    def on_summary(self, manager: Observed, summary: Summary) -> None:
        issued, self._sweeps_issued = self._sweeps_issued, self._sweeps_now()
        self._unheard_steps, self._heard = 0, time.monotonic()
        if not manager.armed or summary.forward_launched < manager.rearmed_at:
            self._last = None
        elif self._last is None or self._last.forward_launched < manager.rearmed_at:
            self._ahead, self._slack = _ahead(summary), summary.launched_since
            self._doubted = False
            self._due.clear()
            self._start_period(summary)
        elif self._ticks - self._checked_tick >= self._config.health_check_interval:
            between = CountsBetween(self._last, summary)
            expected = {k: n - self._sweeps_checked.get(k, 0) for k, n in issued.items()}
            self._start_period(summary)
            self._check(manager, between, expected)

    def _start_period(self, summary: Summary) -> None:
        self._last, self._checked_tick = summary, self._ticks
        self._sweeps_checked = self._sweeps_now()

    def _sweeps_now(self) -> dict[PoolKind, int]:
        return dict(self._sweep.launches) if self._sweep else {}

    def _check(
        self, manager: Observed, between: CountsBetween, sweeps: dict[PoolKind, int]
    ) -> None:
        problems: list[str] = []
        silent: list[str] = []
        forwards = between.forwards_launched
        if forwards:
            silent += self._silent_tags(between)
            problems += self._lost_checks(between)
        if forwards or self._due:
            problems += self._without_fingerprints(between)
        problems += self._miscounted(between.later)
        problems += self._lost_hooks()
        silent += self._silent_sweeps(between, sweeps)
        if silent:
            problems.insert(0, f"did not run: {', '.join(silent)}")
        self._conclude(manager, problems, tuple(silent), between)

    def _miscounted(self, summary: Summary) -> list[str]:
        """Whether the counts of device and host differ. A difference that a late copy explains may occur once."""
        surplus = _ahead(summary) - self._ahead
        if -self._slack <= surplus < 0:
            self._ahead, self._slack, surplus = _ahead(summary), 0, 0
        explained = 0 < surplus <= summary.launched_since
        self._doubted, was_doubted = explained, self._doubted
        if surplus == 0 or (explained and not was_doubted):
            return []
        self._ahead = _ahead(summary)
        kind = "more" if surplus > 0 else "fewer"
        return [f"the device counted {abs(surplus)} forwards {kind} than were launched"]

    def _silent_tags(self, between: CountsBetween) -> list[str]:
        launches = between.by_tag(self._tags, TagCounter.LAUNCHES)
        return [name for name, count in launches.items() if count <= 0]

    def _lost_checks(self, between: CountsBetween) -> list[str]:
        """Groups whose TAIL has run less often than their HEAD; no other counter shows that."""
        problems = []
        for group in self._groups:
            head, tail = (
                between.grown(
                    CanaryLaunchTag(group.kind, group.halves[0], side), TagCounter.LAUNCHES
                )
                for side in PER_FORWARD
            )
            if 0 < tail < head - MAX_UNDER_WAY - between.abandoned:
                problems.append(f"TAIL of {group.kind.value} ran {tail} times, HEAD {head} times")
        return problems

    def _without_fingerprints(self, between: CountsBetween) -> list[str]:
        """Tags whose slots were written without the requested content fingerprint."""
        if self._config.content_mode is ContentMode.NONE:
            return []
        tags = content_tags(self._groups)
        bad = [tag.name for tag in tags if self._lacks_fingerprints(tag, between)]
        return [f"no content fingerprints of the slots written at {', '.join(bad)}"] if bad else []

    def _lacks_fingerprints(self, tag: CanaryLaunchTag, between: CountsBetween) -> bool:
        """Those of a long prefill come after its step's copy. The next check must see them."""
        later, was_due = between.later, tag in self._due
        self._due.discard(tag)
        if between.grown(tag, TagCounter.CONTENT_WRITTEN) > 0:
            return False
        wrote = between.grown(tag, TagCounter.WRITTEN) > 0
        # A copy under load may have caught a later forward, and not its fingerprints.
        may_come = later.content_due or later.launched_since
        if wrote and may_come and not was_due:
            self._due.add(tag)
            return False
        return wrote or was_due

    def _silent_sweeps(self, between: CountsBetween, expected: dict[PoolKind, int]) -> list[str]:
        """SWEEP tags that have run less often than `expected`, the minimum number issued between the two copies.

        Only one copy is under way at a time. A launch issued when a copy arrives runs after it, before the next copy.
        """
        tags = tags_of(self._groups, (Side.SWEEP,))
        return [
            t.name for t in tags if between.grown(t, TagCounter.LAUNCHES) < expected.get(t.kind, 0)
        ]

    def _conclude(
        self,
        manager: Observed,
        problems: list[str],
        tags: tuple[str, ...],
        between: CountsBetween | None = None,
    ) -> None:
        was_healthy, self.healthy = self.healthy, not problems
        self.checks += 1
        self.failures += bool(problems)
        if problems or not was_healthy or self.checks == 1:
            self._emit(problems, tags, between)
        if not problems:
            if not was_healthy:
                logger.info("kv-canary healthy again on the %s runner", self._role)
            return
        text = self._text(problems, between)
        if self._config.mode is CanaryMode.RAISE:
            leave_last_words(text)
        else:
            logger.error("%s", text)
        error = tell_all(self.listeners, manager)
        if self._config.mode is CanaryMode.RAISE:
            raise CanaryHealthError(text)
        if error is not None:
            raise error

    def _text(self, problems: list[str], between: CountsBetween | None) -> str:
        since = ""
        if between is not None:
            since = (
                f" since step {between.earlier.step}, in {between.steps} steps and "
                f"{between.forwards_launched} forwards"
            )
        return (
            f"{UNHEALTHY} on the {self._role} runner{since}: {'; '.join(problems)}. "
            "K/V may be unprotected. Restart the server; if it happens again, report the model and its flags"
        )

    def _emit(
        self, problems: list[str], tags: tuple[str, ...], between: CountsBetween | None
    ) -> None:
        self._sink.emit(
            {
                "event": "health",
                "healthy": not problems,
                "problems": problems,
                "tags": list(tags),
                "step": between.later.step if between else None,
                "forwards": between.forwards_launched if between else None,
            }
        )


def _ahead(summary: Summary) -> int:
    return summary.forward_done - summary.forward_launched
