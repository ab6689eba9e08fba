"""SWA divergence: proof that a test really exercised the sliding window, counted on the device.

A clean SWA run says little when no token ever left the window and no slot was ever re-used. One line every N
steps tells what happened in the interval.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup, PoolKind
from sglang.srt.kv_canary.endpoint import CanaryLaunchTag, Side
from sglang.srt.kv_canary.runner.event_sink import EventSink
from sglang.srt.kv_canary.runner.launch_counts import CountsBetween
from sglang.srt.kv_canary.runner.step_observer import StepObserver, Summary
from sglang.srt.kv_canary.state import Counter

if TYPE_CHECKING:
    from sglang.srt.kv_canary.runner.manager import CanaryManager

logger = logging.getLogger(__name__)

PREFIX = "kv_canary_swa_divergence="
_FULL = CanaryLaunchTag(PoolKind.FULL, "K", Side.HEAD)
_SWA = CanaryLaunchTag(PoolKind.SWA, "K", Side.HEAD)


@dataclass(frozen=True, slots=True)
class SwaDivergenceLog:
    """What happened since the line before. One forward counts a slot once, however many halves it has."""

    forward_ct: int  # forwards since the start
    verify_full: int  # slots of the FULL pool that forwards verified
    verify_swa: int  # slots of the SWA pool: at most the window of each request
    swa_full_idx_divergence: (
        int  # verified slots whose SWA slot has another number than the full one
    )
    swa_out_of_window_tokens: int  # prefix tokens that lie before the window

    def format(self) -> str:
        """The line, without a newline."""
        return PREFIX + json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> SwaDivergenceLog:
        """The log of a line that contains one. Raises ValueError for any other line."""
        _, found, text = line.partition(PREFIX)
        try:
            values = json.JSONDecoder().raw_decode(text)[0] if found else None
        except json.JSONDecodeError:
            values = None
        if values is None:
            raise ValueError(f"expected a line with {PREFIX}<json>, got {line!r}")
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise ValueError(f"expected the fields {names}, got {values!r}")
        return cls(**values)

    @classmethod
    def find_last(cls, text: str) -> SwaDivergenceLog | None:
        """The newest complete line in `text`, a log; None where there is none."""
        for line in reversed(text.splitlines()):
            if PREFIX in line:
                try:
                    return cls.parse(line)
                except ValueError:  # cut off, because the log is still being written
                    continue
        return None


class SwaDivergenceReporter(StepObserver):
    """Logs a line every `interval` steps in which a summary arrives; needs a FULL and an SWA group.

    The plan of a forward is made inside of graphs, where only the device can count. So what was planned is observed
    when the device's counters arrive.
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

    def on_summary(self, manager: CanaryManager, summary: Summary) -> None:
        if self.enabled:
            self.observe_after_invoke_plan(summary)
            self.step()

    def observe_after_invoke_plan(self, summary: Summary) -> None:
        """Take over what the forwards up to `summary` planned and verified."""
        self._latest = summary
        if self._reported is None:
            self._reported = summary

    def step(self) -> SwaDivergenceLog | None:
        """Log and return the line, if one is due."""
        if self._latest is None or self._latest.step - self._reported.step < self._interval:
            return None
        between = CountsBetween(self._reported, self._latest)
        self._reported = self._latest
        line = SwaDivergenceLog(
            forward_ct=between.later.forward_done,
            verify_full=between.grown(_FULL, Counter.CHECKED),
            verify_swa=between.grown(_SWA, Counter.CHECKED),
            swa_full_idx_divergence=between.grown(_SWA, Counter.IDX_DIVERGENCE),
            swa_out_of_window_tokens=between.grown(_SWA, Counter.OUT_OF_WINDOW),
        )
        logger.info("%s", line.format())
        self._sink.emit({"event": "swa_divergence", **asdict(line)})
        return line
