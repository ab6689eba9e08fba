"""Remembers which `free()` call listed a slot last, to find slots that the frees of one launch name twice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAST_NUMBER = 2**31 - 1


@dataclass(slots=True)
class FreeMarks:
    """One number per slot: that of the last call that listed the slot, or a page that begins with it. 0: none.

    Every launch takes numbers above all earlier ones, so marks need no clearing between launches.
    """

    marks: torch.Tensor  # int32[num_slots]
    _taken: int = 0

    @classmethod
    def allocate(cls, num_slots: int, device: torch.device) -> FreeMarks:
        return cls(torch.zeros(num_slots, dtype=torch.int32, device=device))

    def take(self, count: int) -> int:
        """The highest of `count` new numbers. Clears the marks once in 2^31 numbers, on the current stream."""
        if self._taken > LAST_NUMBER - count:
            self.marks.zero_()
            self._taken = 0
        self._taken += count
        return self._taken
