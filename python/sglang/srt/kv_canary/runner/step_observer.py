"""What reporters and the sweep implement to take part in a step; all of them share one copy of the counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..buffer_group import CanaryBufferGroup
from ..config import CanaryConfig
from ..endpoint import NUM_TAGS
from ..launch.launcher import Launcher
from ..reports.internal_errors import InternalErrors
from ..reports.violation_manager import ViolationManager
from ..state import HEADER_WORDS, NUM_COUNTERS, CanaryDeviceState, Header
from .host_clock import HostClock


class Observed(Protocol):
    """What an observer may read of the CanaryManager that calls it."""

    config: CanaryConfig
    groups: tuple[CanaryBufferGroup, ...]
    state: CanaryDeviceState
    launcher: Launcher
    violations: ViolationManager
    errors: InternalErrors
    clock: HostClock
    forward_ct: int
    armed: bool
    serving: bool
    schedule_stream: Any | None
    radix_cache: Any | None


@dataclass(frozen=True, slots=True)
class CopyPoint:
    """What the host had launched when the copy of the summary that follows it was started."""

    step: int
    forward_ct: int
    abandoned_ct: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The device's counters as of some step, on the host."""

    step: int
    forward_launched: int  # forwards that the host had launched when the copy was started
    forward_done: int  # the device's own count, of the same moment in stream order
    abandoned: int  # times that launched forwards raised
    launched_since: int  # forwards launched while the copy was under way; on a busy GPU it may have caught them too
    violations: int
    counters: torch.Tensor  # int64[NUM_TAGS, NUM_COUNTERS], host

    @classmethod
    def from_host(cls, summary: torch.Tensor, point: CopyPoint, forward_ct: int) -> Summary:
        """`forward_ct`: forwards launched by now."""
        return cls(
            step=point.step,
            forward_launched=point.forward_ct,
            forward_done=int(summary[Header.FORWARD_DONE]),
            abandoned=point.abandoned_ct,
            launched_since=forward_ct - point.forward_ct,
            violations=int(summary[Header.VIOLATIONS]),
            counters=summary[HEADER_WORDS:].view(NUM_TAGS, NUM_COUNTERS).clone(),
        )


class StepObserver:
    """Base class: every method does nothing. Called from the scheduler's thread, outside of graphs.

    What one observer raises does not stop the others. See InternalErrors for what becomes of it.
    """

    def before_forwards(self, manager: Observed) -> None:
        """Before the step's forwards are launched, on the forward stream."""

    def after_forwards(self, manager: Observed) -> bool | None:
        """After they were launched; device work put here runs after them.

        Returns whether it waits for the counters: then they are copied at once, not at most every `copy_every_s`.
        """

    def on_summary(self, manager: Observed, summary: Summary) -> None:
        """A copy of the counters arrived."""

    def on_idle(self, manager: Observed) -> bool:
        """The scheduler has nothing to run. Returns whether device work was launched, to be copied back."""
        return False

    def attach_radix_cache(self, tree_cache: Any) -> None:
        """The prefix cache exists now."""
