"""The sweep of host memory: compares the bytes of every page there with their records, a part at a time."""

from __future__ import annotations

import time

from ..config import CanaryConfig
from ..reports.event_sink import EventSink
from ..runner.step_observer import Observed, StepObserver
from .host_tier import HostTier

LOOKED_AT = 65536  # host slots maximum of one part; most of them may be empty


class HostSweep(StepObserver):
    """Runs on the host, with a budget of its own. Passes begin as often as those of the sweep of the device pool."""

    def __init__(self, config: CanaryConfig, tiers: tuple[HostTier, ...], sink: EventSink) -> None:
        """A pass goes through `tiers` one after the other. Content is checked in all of them."""
        self._tiers = tiers
        self._sink = sink
        self._interval = config.sweep_interval
        self._every = config.sweep_every_n_steps
        self._budget_bytes = config.host_sweep_budget_bytes
        self._tick = 0
        self._next_pass = self._next_part = self._interval
        self._now = 0  # the tier of the next part
        self._at = 0  # its next host slot
        self._compared = 0
        self._started = 0.0
        self._report_every_s = config.sweep_report_every_s
        self._next_report = 0.0
        self.passes = 0

    def after_forwards(self, manager: Observed) -> None:
        self._advance(manager, idle=False)

    def on_idle(self, manager: Observed) -> bool:
        self._advance(manager, idle=True)
        return False

    def _advance(self, manager: Observed, idle: bool) -> None:
        self._tick += 1
        begins = self._now == self._at == 0
        due = self._next_pass if begins else self._next_part
        if not manager.armed or not self._tiers[0].content or self._tick < due:
            return
        if begins:
            self._started, self._compared = time.monotonic(), 0
            self._next_pass = self._tick + self._interval
        self._next_part = self._tick + (1 if idle else self._every)
        self._compare_part(self._tiers[self._now])

    def _compare_part(self, tier: HostTier) -> None:
        count = max(1, min(LOOKED_AT, self._budget_bytes // tier.bytes_per_slot))
        stop = min(self._at + count, tier.records.num_slots)
        self._compared += tier.compare(self._at, stop)
        self._at = stop % tier.records.num_slots
        if self._at == 0:
            self._now = (self._now + 1) % len(self._tiers)
            if self._now == 0:
                self._pass_done()

    def _pass_done(self) -> None:
        self.passes += 1
        now = time.monotonic()
        if self._compared and now >= self._next_report:
            self._next_report = now + self._report_every_s
            self._sink.emit(
                {
                    "event": "host_sweep",
                    "number": self.passes,
                    "slots": self._compared,
                    "seconds": round(now - self._started, 6),
                }
            )
