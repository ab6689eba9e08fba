"""Phases of one forward, checked. The error about a missed or doubled phase names both callers."""

from __future__ import annotations

import sys
from enum import Enum
from types import CodeType

from ..errors import CanaryPhaseError
from ..host_code import HOST


class Phase(Enum):
    may_follow: tuple[Phase, ...]

    IDLE = "idle"
    PRE_OUTSIDE = "pre-ops outside the graph"
    PRE_INSIDE = "pre-ops inside the graph"
    POST_INSIDE = "post-ops inside the graph"


# What a phase may follow. Kept with the phase: a dictionary would ask for the hash of an enum, which is Python code.
Phase.PRE_OUTSIDE.may_follow = (Phase.IDLE,)
# From IDLE: warm-up, capture and tests run the model without outside phases. From POST_INSIDE: a step runs the
# model again (several forwards in one outside bracket).
Phase.PRE_INSIDE.may_follow = (Phase.IDLE, Phase.PRE_OUTSIDE, Phase.POST_INSIDE)
Phase.POST_INSIDE.may_follow = (Phase.PRE_INSIDE,)


# Put into words only for an error: phases are entered in every step.
_Caller = tuple[CodeType, int]  # code and instruction


def _words(caller: _Caller | None) -> str:
    if caller is None:
        return "nobody"
    code, instruction = caller
    spans = code.co_lines()
    line = next((line for start, end, line in spans if start <= instruction < end), None)
    return f"{code.co_filename}:{line} in {code.co_name}"


class PhaseTracker:
    """The current phase and who entered it."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self._entered_by: _Caller | None = None
        self._outside = False

    def enter(self, phase: Phase) -> None:
        """Raises CanaryPhaseError, and returns to IDLE, if `phase` may not follow the current one."""
        frame, code = HOST.caller(2)
        caller = code, frame.f_lasti
        if self.phase not in phase.may_follow:
            message = (
                f"kv-canary: {phase.value} entered by {_words(caller)} while in {self.phase.value}, "
                f"entered by {_words(self._entered_by)}"
            )
            self.reset()
            raise CanaryPhaseError(message)
        if phase is Phase.PRE_OUTSIDE:
            self._outside = True
        self._entered_by, self.phase = caller, phase
        if phase is Phase.POST_INSIDE and not self._outside:
            self.reset()

    def replayed(self) -> None:
        """A graph with the inside phases was replayed."""
        if self.phase in (Phase.PRE_OUTSIDE, Phase.POST_INSIDE):
            self.phase = Phase.POST_INSIDE

    def leave(self) -> None:
        """The forward is over. Raises CanaryPhaseError unless both inside phases ran."""
        phase = self.phase
        self.phase, self._outside = Phase.IDLE, False
        if phase is not Phase.POST_INSIDE:
            frame = sys._getframe(1)
            ended_at = _words((frame.f_code, frame.f_lasti))
            raise CanaryPhaseError(
                f"kv-canary: the forward ended at {ended_at} in {phase.value}, entered by {_words(self._entered_by)}: "
                "its K/V was not checked. This forward path is not covered; start without --kv-canary or "
                "report the model and its flags"
            )

    def reset(self) -> None:
        self.phase, self._outside = Phase.IDLE, False
