"""A history: operations, one after the other, on a world and its oracle."""

from __future__ import annotations

from collections.abc import Sequence

from ..oracle import Row
from .between_forwards import BetweenForwards
from .comparison import Comparison
from .damage import DAMAGE_HANDLERS
from .operations import (
    AllocatorEvent,
    AllocatorRuns,
    Arm,
    Clear,
    Evict,
    Move,
    MovePage,
    Operation,
    Release,
    SetAnchor,
    Step,
    Sweep,
    UpdateWeights,
)
from .steps import Steps


class History(Steps, BetweenForwards, Comparison):
    """Runs operations on a world and its oracle, and compares them after each."""

    def run(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self.apply(operation)

    def apply(self, operation: Operation) -> list[Row]:
        """Run one operation; the violation rows that it led to. Raises AssertionError where the two sides differ."""
        _HANDLERS[type(operation)](self, operation)
        return self._compare(operation)


_HANDLERS = {
    **DAMAGE_HANDLERS,
    Step: History._do_step,
    Release: History._do_release,
    Evict: History._do_evict,
    AllocatorEvent: History._do_allocator_event,
    AllocatorRuns: History._do_allocator_runs,
    Clear: History._do_clear,
    Move: History._do_move,
    MovePage: History._do_move_page,
    Sweep: History._do_sweep,
    Arm: History._do_arm,
    UpdateWeights: History._do_update_weights,
    SetAnchor: History._do_set_anchor,
}
