"""The interface of reporters and sweep for taking part in a step. They all share one copy of the counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..buffer_group import CanaryBufferGroup
from ..config import CanaryConfig
from ..endpoint import NUM_TAGS
from ..launch.launcher import Launcher
from ..reports.internal_errors import InternalErrors
from ..reports.violation_manager import ViolationManager
from ..state import HEADER_WORDS, NUM_COUNTERS, CanaryDeviceState, Header
from .arrival_desk import ArrivalDesk
from .damage_desk import DamageDesk
from .host_clock import HostClock
from .slot_ledger import SlotLedger


class Observed(Protocol):
    """What an observer may read from the CanaryManager that calls it."""

    config: CanaryConfig
    groups: tuple[CanaryBufferGroup, ...]
    state: CanaryDeviceState
    launcher: Launcher
    ledger: SlotLedger
    arrivals: ArrivalDesk | None
    damage: DamageDesk | None
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
    """The host's launches at the start of a summary's copy."""

    step: int
    forward_ct: int
    abandoned_ct: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The device's counters at some step, on the host."""

    step: int
    forward_launched: int  # forwards that the host had launched when the copy started
    forward_done: int  # the device's own count at the same moment in stream order
    abandoned: int  # how often launched forwards raised
    launched_since: int  # forwards launched during the copy; on a busy GPU it may include them
    violations: int
    counters: np.ndarray  # int64[NUM_TAGS, NUM_COUNTERS]

    @classmethod
    def from_host(cls, summary: torch.Tensor, point: CopyPoint, forward_ct: int) -> Summary:
        """`forward_ct`: forwards launched so far."""
        words = summary.numpy()  # torch takes 40 us a step for what follows
        header = words[:HEADER_WORDS].tolist()
        return cls(
            step=point.step,
            forward_launched=point.forward_ct,
            forward_done=header[Header.FORWARD_DONE],
            abandoned=point.abandoned_ct,
            launched_since=forward_ct - point.forward_ct,
            violations=header[Header.VIOLATIONS],
            counters=words[HEADER_WORDS:].reshape(NUM_TAGS, NUM_COUNTERS).copy(),
        )


class StepObserver:
    """Base class: every method does nothing. Called from the scheduler's thread, outside graphs.

    An error of one observer does not stop the others. See InternalErrors for what happens to it.
    """

    def before_forwards(self, manager: Observed) -> None:
        """Before the step's forwards are launched, on the forward stream."""

    def after_forwards(self, manager: Observed) -> bool | None:
        """After they were launched. Device work queued here runs after them.

        Returns whether the observer waits for the counters. If so, they are copied immediately, without regard to
        `copy_every_s`.
        """

    def after_arrivals(self, manager: Observed) -> None:
        """After the check of KV that arrived was launched, on the forward stream."""

    def on_summary(self, manager: Observed, summary: Summary) -> None:
        """A copy of the counters arrived."""

    def on_idle(self, manager: Observed) -> bool:
        """The scheduler has nothing to run. Returns whether device work was launched that must be copied back."""
        return False

    def on_finish(self, manager: Observed, deadline: float) -> None:
        """The process ends. Hand over what is found by `deadline`, in seconds of `time.monotonic`."""

    def attach_radix_cache(self, tree_cache: Any) -> None:
        """The prefix cache now exists."""
