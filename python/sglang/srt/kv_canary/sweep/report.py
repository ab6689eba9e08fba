"""Reports of the sweep: findings immediately, clean passes from time to time, as totals."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..reports.event_sink import EventSink

logger = logging.getLogger(__name__)

FINDINGS_EVERY_S = 10.0  # between two reports of passes with the same findings
PROGRESS_AFTER_S = 10.0  # how long a pass runs before a progress line


@dataclass(frozen=True, slots=True)
class PassDone:
    """A completed pass."""

    number: int
    slots: Mapping[str, int]  # checked per pool kind
    chunks: int
    seconds: float
    findings: int


@dataclass(slots=True)
class _Sum:
    """Passes since the last report, including the reported one."""

    passes: int = 0
    slots: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, done: PassDone) -> None:
        self.passes += 1
        self.slots.update(done.slots)
        self.seconds += done.seconds


class SweepReporter:
    """One event and one log line per report.

    Reported immediately: the first pass, a pass with more findings than the last reported one, and then the first
    clean pass.
    """

    def __init__(self, sink: EventSink, clean_every_s: float) -> None:
        self._sink = sink
        self._clean_every_s = clean_every_s
        self._since = _Sum()
        self._passes = 0
        self._findings: int | None = None  # findings of the last reported pass
        self._reported = 0.0
        self._next_progress = 0.0

    def pass_done(self, done: PassDone) -> None:
        self._passes += 1
        self._since.add(done)
        now = time.monotonic()
        if not (self._is_news(done) or now - self._reported >= self._every_s(done)):
            return
        self._sink.emit(self._event(done))
        log = logger.error if done.findings else logger.info
        log("%s", self._line(done))
        self._since, self._findings, self._reported = _Sum(), done.findings, now

    def under_way(self, number: int, started: float, slots: Mapping[str, int]) -> None:
        """A pass that began at `started` (time.monotonic()) is still running."""
        now = time.monotonic()
        if now >= max(self._next_progress, started + PROGRESS_AFTER_S):
            self._next_progress = now + self._clean_every_s
            logger.info(
                "kv-canary sweep: pass %d under way for %.1f s, %s so far",
                number,
                now - started,
                _slots_text(slots),
            )

    def _is_news(self, done: PassDone) -> bool:
        if self._findings is None:
            return True
        return done.findings > self._findings or (self._findings > 0 and not done.findings)

    def _every_s(self, done: PassDone) -> float:
        return FINDINGS_EVERY_S if done.findings else self._clean_every_s

    def _event(self, done: PassDone) -> dict[str, Any]:
        return {
            "event": "sweep_pass",
            "pass": done.number,
            "passes": self._passes,
            "slots": dict(done.slots),
            "chunks": done.chunks,
            "seconds": round(done.seconds, 6),
            "findings": done.findings,
            "since_last": {
                "passes": self._since.passes,
                "slots": dict(self._since.slots),
                "seconds": round(self._since.seconds, 6),
            },
        }

    def _line(self, done: PassDone) -> str:
        line = (
            f"kv-canary sweep: pass {done.number} done: {_slots_text(done.slots)} in {done.seconds:.2f} s, "
            f"{done.chunks} chunks, {done.findings} findings"
        )
        since = self._since
        if since.passes > 1:
            line += (
                f"; {since.passes} passes since the last line: {_slots_text(since.slots)} in "
                f"{since.seconds:.2f} s"
            )
        return line


def _slots_text(slots: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind} slots" for kind, count in slots.items()) or "0 slots"
