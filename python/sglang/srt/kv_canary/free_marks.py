"""Notes which call of the allocator's `free()` listed a slot last, for frees of one launch that name a slot twice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAST_NUMBER = 2**31 - 1


@dataclass(slots=True)
class FreeMarks:
    """A number per slot: that of the call which listed it, or a page that it begins, last; 0: none did.

    Every launch takes numbers above all that were taken before, so that marks need no clearing between launches.
    """

    marks: torch.Tensor  # int32[num_slots]
    _taken: int = 0

    @classmethod
    def allocate(cls, num_slots: int, device: torch.device) -> FreeMarks:
        return cls(torch.zeros(num_slots, dtype=torch.int32, device=device))

    def take(self, count: int) -> int:
        """The highest of `count` new numbers. Once in 2^31 numbers it clears the marks, on the current stream."""
        if self._taken > LAST_NUMBER - count:
            self.marks.zero_()
            self._taken = 0
        self._taken += count
        return self._taken
