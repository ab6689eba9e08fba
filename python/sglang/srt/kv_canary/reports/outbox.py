"""Reads what the device publishes in host memory at the end of each forward, without a call into CUDA."""

from __future__ import annotations

import torch

from ..state import OUTBOX_BITS

__all__ = ["Outbox", "forward_of"]

_MASK = (1 << OUTBOX_BITS) - 1
_HALF = 1 << (OUTBOX_BITS - 1)


def forward_of(word: int, launched: int) -> int | None:
    """The forward that `word`, as published, tells of. None: none of those up to `launched`."""
    behind = (launched - word) & _MASK
    return launched - behind if behind < _HALF else None


class Outbox:
    """What was found (`found`, of all time) by forwards up to `forward`, as last taken.

    Only what is `trusted` is taken. Each copy of the counters says whether the device's own word has arrived here.
    """

    __slots__ = ("_expected", "_taken", "_words", "forward", "found", "trusted")

    def __init__(self, word: torch.Tensor) -> None:
        """`word`: int64[1] of the device state, which kernels write."""
        # Its item is read as one load of 8 bytes, so it is never half of two words.
        self._words = memoryview(word.numpy())
        self._taken: int | None = None
        self.forward = self.found = 0
        self._expected = 0
        self.trusted = False

    def take(self, launched: int) -> bool:
        """Returns whether something was published since the last call. `launched`: forwards that the host counts."""
        word = self._words[0]
        if word == self._taken or not self.trusted:
            return False
        forward = forward_of(word, launched)
        if forward is None:  # copies say what is wrong
            self.trusted = False
            return False
        self._taken, self.forward = word, forward
        self.found += ((word >> OUTBOX_BITS) - self.found) & _MASK
        return True

    def expect(self, published: int) -> None:
        """`published`: what the device says that it has written. From the next `check` on, it must be here."""
        self._expected = published

    def check(self, launched: int) -> None:
        """Trust what is here if it is the expected word or a later one, of a forward that was launched."""
        word = self._words[0]
        has_arrived = (word - self._expected) & _MASK < _HALF
        self.trusted = has_arrived and forward_of(word, launched) is not None
