"""SWA divergence: proof, counted on the device, that a test really exercised the sliding window.

A clean SWA run proves little if no token ever left the window and no slot was ever re-used. One line every N
steps shows the totals so far.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, fields

from ..buffer_group import CanaryBufferGroup
from ..endpoint import CanaryLaunchTag
from ..pool_kind import PoolKind, Side
from ..reports.event_sink import EventSink
from ..runner.step_observer import Observed, StepObserver, Summary
from ..state import TagCounter

logger = logging.getLogger(__name__)

PREFIX = "kv_canary_swa_divergence="
_FULL = CanaryLaunchTag(PoolKind.FULL, "K", Side.HEAD)
_SWA = CanaryLaunchTag(PoolKind.SWA, "K", Side.HEAD)


@dataclass(frozen=True, slots=True)
class SwaDivergenceLog:
    """Totals since the start. One forward counts a slot once, however many halves it has."""

    forward_ct: int  # forwards
    verify_full: int  # slots of the FULL pool that forwards verified
    verify_swa: int  # slots of the SWA pool: at most the window of each request
    swa_full_idx_divergence: (
        int  # verified slots whose SWA slot has another number than the full one
    )
    swa_out_of_window_tokens: int  # prefix tokens that lie before the window

    def format(self) -> str:
        """The line, without a newline. The value has no spaces: SGLang's log tools read up to the first one."""
        return PREFIX + json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, line: str) -> SwaDivergenceLog | None:
        """The log in `line`. None for any other line, and for a truncated one."""
        _, found, text = line.partition(PREFIX)
        if not found:
            return None
        try:
            values, _ = json.JSONDecoder().raw_decode(text)
        except json.JSONDecodeError:
            return None
        if not isinstance(values, dict) or set(values) != {field.name for field in fields(cls)}:
            return None
        if any(type(value) is not int for value in values.values()):
            return None
        return cls(**values)

    @classmethod
    def find_all(cls, text: str) -> list[SwaDivergenceLog]:
        """The logs of all complete lines in `text`, a server log, oldest first."""
        found = (cls.parse(line) for line in text.splitlines())
        return [log for log in found if log is not None]

    @classmethod
    def find_last(cls, text: str) -> SwaDivergenceLog | None:
        """The newest complete log in `text`, a server log; None if there is none."""
        found = (cls.parse(line) for line in reversed(text.splitlines()))
        return next((log for log in found if log is not None), None)


class SwaDivergenceReporter(StepObserver):
    """Logs a line every `interval` steps in which a summary arrives; needs a FULL and an SWA group.

    A forward's plan is made inside graphs, where only the device can count. So the counts are observed when the
    device's counters arrive.
    """

    def __init__(
        self, interval: int, groups: tuple[CanaryBufferGroup, ...], sink: EventSink
    ) -> None:
        self._interval = interval
        self._sink = sink
        self._reported: Summary | None = None
        self._latest: Summary | None = None
        kinds = {group.kind for group in groups}
        self.enabled = {PoolKind.FULL, PoolKind.SWA} <= kinds
        if not self.enabled:
            held = ", ".join(sorted(kind.value for kind in kinds))
            logger.info("kv-canary: no SWA divergence lines: the pools are %s", held)

    def on_summary(self, manager: Observed, summary: Summary) -> None:
        if self.enabled:
            self.observe_after_invoke_plan(summary)
            self.step()

    def observe_after_invoke_plan(self, summary: Summary) -> None:
        """Take the counts of the forwards up to `summary`."""
        self._latest = summary
        if self._reported is None:
            self._reported = summary

    def step(self) -> SwaDivergenceLog | None:
        """Log and return the line, if one is due."""
        if self._latest is None or self._latest.step - self._reported.step < self._interval:
            return None
        latest = self._reported = self._latest
        line = SwaDivergenceLog(
            forward_ct=latest.forward_done,
            verify_full=_total(latest, _FULL, TagCounter.CHECKED),
            verify_swa=_total(latest, _SWA, TagCounter.CHECKED),
            swa_full_idx_divergence=_total(latest, _SWA, TagCounter.IDX_DIVERGENCE),
            swa_out_of_window_tokens=_total(latest, _SWA, TagCounter.OUT_OF_WINDOW),
        )
        logger.info("%s", line.format())
        self._sink.emit({"event": "swa_divergence", **asdict(line)})
        return line


def _total(summary: Summary, tag: CanaryLaunchTag, counter: TagCounter) -> int:
    return int(summary.counters[tag.id, counter])
