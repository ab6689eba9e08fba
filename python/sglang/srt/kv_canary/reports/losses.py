"""Findings that no event tells: how many they are, and of which forwards.

Their readers may be named nowhere, so a list of readers says that it may lack some.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from .event_sink import EventSink

OVERWRITTEN = "overwritten"  # in the ring, before the host had fetched them
DROPPED = "dropped"  # because too many waited to be read
EVERY_S = 10.0  # at most one event for each of the two in this time


@dataclass(frozen=True, slots=True)
class Loss:
    """Findings of some forwards that were lost in the same way."""

    why: str
    findings: int
    first_forward: int
    last_forward: int
    since: float  # Unix time in seconds

    def joined(self, later: Loss) -> Loss:
        """Both as one."""
        return Loss(
            self.why,
            self.findings + later.findings,
            min(self.first_forward, later.first_forward),
            max(self.last_forward, later.last_forward),
            self.since,
        )

    def as_event(self) -> dict[str, str | int | float]:
        return {
            "event": "findings_lost",
            "why": self.why,
            "findings": self.findings,
            "first_forward": self.first_forward,
            "last_forward": self.last_forward,
            "since": self.since,
        }


class Losses:
    """Tells losses: the first at once, those of the next EVERY_S seconds as one."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._waiting: dict[str, Loss] = {}  # by `why`
        self._written: dict[str, float] = {}  # by `why`: time.monotonic() of the last one

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def note(self, why: str, findings: int, first_forward: int, last_forward: int) -> None:
        """So many findings of these forwards are lost."""
        loss = Loss(why, findings, first_forward, last_forward, time.time())
        known = self._waiting.get(why)
        self._waiting[why] = loss if known is None else known.joined(loss)

    def write(self, at_once: bool = False) -> None:
        """Write those whose turn it is, or all that wait."""
        now = time.monotonic()
        for why in list(self._waiting):
            if at_once or now - self._written.get(why, float("-inf")) >= EVERY_S:
                self._written[why] = now
                self._sink.emit(self._waiting.pop(why).as_event())
