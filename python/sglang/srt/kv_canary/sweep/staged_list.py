"""A list of cached slots that was made at once, and is verified in parts over several steps.

In that time slots change hands. A slot is left out once its record has changed: it was freed, or written again. So is
a predecessor. The next pass lists what is cached then. The writer alone does not tell records apart. HiCache brings
them back with their writers, to other slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..buffer_group import CanaryBufferGroup
from ..cuda_streams import keep_until_read
from ..plan.plan_input import SweepVerifyPlan
from ..record import (
    MIX_MULTIPLIER_1,
    MIX_MULTIPLIER_2,
    PREV_UNREACHABLE,
    WORD_CHAIN,
    WORD_IDENTITY,
    WORD_WRITER,
    to_signed64,
)

__all__ = ["Plans", "StagedList", "warm_up_staged_list"]

# Odd: a record with one other word has another sum
_FACTORS = {
    WORD_IDENTITY: to_signed64(MIX_MULTIPLIER_1),
    WORD_CHAIN: to_signed64(MIX_MULTIPLIER_2),
    WORD_WRITER: 1,
}

Plans = tuple[tuple[CanaryBufferGroup, SweepVerifyPlan], ...]


@dataclass(frozen=True, slots=True)
class _StagedPlan:
    """What one group verifies, and the records of its slots and predecessors when it was listed, int64[n] each."""

    group: CanaryBufferGroup
    plan: SweepVerifyPlan
    records: torch.Tensor
    records_before: torch.Tensor

    @classmethod
    def of(cls, group: CanaryBufferGroup, plan: SweepVerifyPlan) -> _StagedPlan:
        return cls(group, plan, _records_of(group, plan.slots), _records_of(group, plan.prev_slots))

    def part(self, start: int, end: int) -> SweepVerifyPlan:
        """Entries start .. end - 1 as they are now: slot 0, which is not checked, for those that changed hands."""
        plan, group, span = self.plan, self.group, slice(start, end)
        # The list may be of an idle server's stream, and this part of the forwards'.
        keep_until_read(plan.slots, plan.positions, plan.prev_slots, plan.anchors)
        keep_until_read(self.records, self.records_before)
        slots, before = plan.slots[span], plan.prev_slots[span]
        same = _records_of(group, slots) == self.records[span]
        same_before = _records_of(group, before) == self.records_before[span]
        # New tensors, because kernels are compiled for aligned ones.
        return SweepVerifyPlan(
            torch.where(same, slots, 0),
            plan.positions[span].clone(),
            torch.where(same_before, before, PREV_UNREACHABLE),
            None if plan.anchors is None else plan.anchors[span].clone(),
        )


def _records_of(group: CanaryBufferGroup, slots: torch.Tensor) -> torch.Tensor:
    """int64[n], a sum of identity, chain and writer. 0 for what is no slot of the group: that is never left out."""
    is_slot = (slots > 0) & (slots < group.num_slots)
    index = torch.where(is_slot, slots, 0).long()
    sums = torch.zeros_like(index)
    for word, factor in _FACTORS.items():  # one by one: whole records take more memory
        sums += group.k_head[:, word][index] * factor
    return torch.where(is_slot, sums, 0)


class StagedList:
    """The plans of one walk, whose list has `num_slots` slots.

    Use it where checks are launched. There a record is read as all launches before have left it.
    """

    def __init__(self, plans: Plans, num_slots: int) -> None:
        self._staged = [_StagedPlan.of(group, plan) for group, plan in plans]
        self._num_slots = num_slots
        self._done = 0  # slots of the walk

    @property
    def is_over(self) -> bool:
        return self._done >= self._num_slots

    def next(self, slots: int) -> Plans:
        """What belongs to the next `slots` slots of the walk. A slot that stands for several counts as they do."""
        start, self._done = self._done, min(self._done + slots, self._num_slots)
        parts = [(staged.group, self._part(staged, start)) for staged in self._staged]
        return tuple((group, part) for group, part in parts if part.slots.shape[0])

    def _part(self, staged: _StagedPlan, start: int) -> SweepVerifyPlan:
        size = staged.plan.slots.shape[0]
        return staged.part(size * start // self._num_slots, size * self._done // self._num_slots)


def warm_up_staged_list(group: CanaryBufferGroup) -> None:
    """Load what a part takes, on the padding slot: a GPU loads each kernel at its first launch."""
    zeros = torch.zeros(2, dtype=torch.int64, device=group.k_head.device)
    StagedList(((group, SweepVerifyPlan(zeros, zeros, zeros)),), 2).next(1)
