"""The interface of reporters and sweep for taking part in a step. They all share one copy of the counters."""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..buffer_group import CanaryBufferGroup
from ..config import CanaryConfig
from ..endpoint import NUM_TAGS
from ..host_code.twins import HostClock
from ..launch.launcher import Launcher
from ..reports.internal_errors import InternalErrors
from ..reports.violation_manager import ViolationManager
from ..state import HEADER_WORDS, NUM_COUNTERS, CanaryDeviceState, Header
from .arrival_desk import ArrivalDesk
from .damage_desk import DamageDesk
from .slot_ledger import SlotLedger

_HEADER = Struct(f"={Header.VIOLATIONS + 1}q")  # up to VIOLATIONS


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
    rearmed_at: int  # the last forward of the last capture, which had no checks
    publishes: bool  # what the device finds is known without a copy of the counters
    host_has_time: bool  # this step launched a decode behind a decode, so the host is likely to wait for the device
    serving: bool
    schedule_stream: Any | None
    radix_cache: Any | None

    def note_sweep(self) -> None: ...


class CopyPoint(NamedTuple):
    """The host's launches at the start of a summary's copy. A tuple: one is made in each step."""

    step: int
    forward_ct: int
    abandoned_ct: int
    content_due: bool  # fingerprints of slots that are counted as written come after the copy, see LateContent


class Summary:
    """The device's counters at some step, on the host. Counters that nobody asks for are not decoded."""

    __slots__ = (
        "_words",
        "abandoned",
        "content_due",
        "forward_done",
        "forward_launched",
        "launched_since",
        "step",
        "violations",
    )

    def __init__(self, words: bytes, point: CopyPoint, forward_ct: int) -> None:
        """`words`: those of the device, int64. `forward_ct`: forwards launched so far."""
        # forwards that the host had launched when the copy started
        self.step, self.forward_launched, self.abandoned, self.content_due = point
        self.launched_since = forward_ct - self.forward_launched  # on a busy GPU it may have them
        # the device's own count of forwards at the same moment in stream order
        self.forward_done, _, _, self.violations = _HEADER.unpack_from(words)
        self._words = words

    @classmethod
    def from_host(cls, summary: torch.Tensor, point: CopyPoint, forward_ct: int) -> Summary:
        """Copies `summary`, which the next copy overwrites."""
        return cls(summary.numpy().tobytes(), point, forward_ct)

    @property
    def counters(self) -> np.ndarray:
        """int64[NUM_TAGS, NUM_COUNTERS], read-only."""
        words = np.frombuffer(self._words, dtype=np.int64)
        return words[HEADER_WORDS:].reshape(NUM_TAGS, NUM_COUNTERS)


class StepObserver:
    """Base class: every method does nothing. Called from the scheduler's thread, outside graphs.

    An error of one observer does not stop the others. See InternalErrors for what happens to it.
    """

    healthy = True  # False: something that should check does not

    def after_forwards(self, manager: Observed) -> bool | None:
        """After they were launched. Device work queued here runs after them.

        Returns whether the observer waits for the counters. If so, they are copied immediately, without regard to
        `copy_every_s`.
        """

    def after_late_launches(self, manager: Observed) -> None:
        """After launches between forwards, on the forward stream: the check of KV that arrived, late fingerprints."""

    def on_summary(self, manager: Observed, summary: Summary) -> None:
        """A copy of the counters arrived, with new violations, or awaited, or `copy_every_s` after the last one."""

    def on_unseen_forwards(self, manager: Observed, results: int) -> None:
        """The scheduler has taken up `results` results of forwards since the last one that the manager has seen."""

    def on_checks_stopped(self, manager: Observed) -> None:
        """Forwards are not checked from now on, because records are out of date."""

    def on_idle(self, manager: Observed) -> bool:
        """The scheduler has nothing to run. Returns whether device work was launched that must be copied back."""
        return False

    def on_finish(self, manager: Observed, deadline: float) -> None:
        """The process ends. Hand over what is found by `deadline`, in seconds of `time.monotonic`."""

    def attach_radix_cache(self, tree_cache: Any) -> None:
        """The prefix cache now exists."""
