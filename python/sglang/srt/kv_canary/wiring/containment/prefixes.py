"""What a containment asks of a prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Computed", "NoPrefixes", "Prefixes"]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a request may have computed from damage."""

    tokens: Sequence[int]  # all of the request
    extra_key: str | None
    start: int  # first position


class Prefixes(Protocol):
    """Used from the scheduler's thread, between two steps. Slots are FULL slots."""

    can_be_repaired: bool  # False: after a wrong row, only a flush makes the cache right again
    # Whether what left the device comes back to slots that `slots_of` does not know
    loads_copies: bool

    @property
    def num_held(self) -> int:
        """Tokens of dropped prefixes that requests still hold, and that are freed with the last of them."""

    @property
    def num_cached(self) -> int:
        """Tokens in the cache, dropped ones included."""

    def slots(self) -> torch.Tensor:
        """int64[n]: all slots of the cache, on its device."""

    def drop(self, slots: Iterable[int] | None, computed: Iterable[Computed] = ()) -> int:
        """Nobody gets a prefix with one of `slots` any more, or any prefix if it is None.

        A cache with more than the device's slots finds `computed` by its tokens. Returns how many tokens were dropped.
        """

    def holds(self, request: Any) -> bool:
        """Whether `request` holds a dropped prefix, so that its own tokens must not be cached under the old key."""

    def free_unheld(self) -> None:
        """Free what no request holds any more. Its slots are rewritten before anybody reads them."""

    def has_unheld(self) -> bool:
        """Whether `free_unheld` would free something."""

    def pin(self, request: Any) -> None:
        """The row of `request`, which ends or has ended, was wrong. What the cache took from it is not freed."""

    def remember(self, request: Any) -> Any:
        """What `slots_of` needs to know of `request` when it is gone. Its row is still its own."""

    def slots_of(self, request: Any, start: int) -> list[int]:
        """Slots of a request's tokens from position `start` on, as far as they are cached."""


class NoPrefixes:
    """A server without a prefix cache."""

    can_be_repaired = True
    loads_copies = False
    num_held = 0
    num_cached = 0

    def slots(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)

    def drop(self, slots: Iterable[int] | None, computed: Iterable[Computed] = ()) -> int:
        return 0

    def holds(self, request: Any) -> bool:
        return False

    def free_unheld(self) -> None:
        pass

    def has_unheld(self) -> bool:
        return False

    def pin(self, request: Any) -> None:
        pass

    def remember(self, request: Any) -> None:
        pass

    def slots_of(self, request: Any, start: int) -> list[int]:
        return []
