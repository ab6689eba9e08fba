"""What reporters and the sweep implement to take part in a step; all of them share one copy a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.kv_canary.endpoint import NUM_TAGS
from sglang.srt.kv_canary.state import HEADER_WORDS, NUM_COUNTERS, Header

if TYPE_CHECKING:
    from sglang.srt.kv_canary.runner.manager import CanaryManager


@dataclass(frozen=True, slots=True)
class Summary:
    """The device's counters as of some step, on the host."""

    step: int
    forward_done: int
    violations: int
    counters: torch.Tensor  # int64[NUM_TAGS, NUM_COUNTERS], host

    @classmethod
    def from_host(cls, summary: torch.Tensor, step: int) -> Summary:
        return cls(
            step=step,
            forward_done=int(summary[Header.FORWARD_DONE]),
            violations=int(summary[Header.VIOLATIONS]),
            counters=summary[HEADER_WORDS:].view(NUM_TAGS, NUM_COUNTERS).clone(),
        )


class StepObserver:
    """Base class: every method does nothing. Called from the scheduler's thread, outside of graphs."""

    def before_forwards(self, manager: CanaryManager) -> None:
        """Before the step's forwards are launched, on the forward stream."""

    def after_forwards(self, manager: CanaryManager) -> None:
        """After they were launched; device work put here runs behind them."""

    def on_summary(self, manager: CanaryManager, summary: Summary) -> None:
        """A copy of the counters arrived. What one observer raises reaches the caller after all have run."""

    def on_idle(self, manager: CanaryManager) -> None:
        """The scheduler has nothing to run."""

    def attach_radix_cache(self, tree_cache: Any) -> None:
        """The prefix cache exists now."""
