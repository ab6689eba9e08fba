"""What the scheduler and the prefix cache say of a request and of slots, asked for only when a scene is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..reports.scene_facts import RowFilled

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RequestNow:
    """A request that has a row. Positions below `cached` came from the prefix cache, below `length` from prefills."""

    tokens: Sequence[int]  # from position 0, as far as the scheduler has them; empty: not known
    cached: int
    prefix: int  # where its last prefill began
    length: int  # and ended

    @property
    def filled(self) -> RowFilled:
        """How it came by its KV, for reports."""
        return RowFilled(self.cached, self.prefix, self.length)


@dataclass(frozen=True, slots=True)
class CachedSpan:
    """Slots of one node of the prefix cache, side by side in a list."""

    start: int  # index of the first of them
    length: int
    node: int | None  # number of the node; None: the tree does not tell
    locks: int | None  # requests that use the node


@dataclass(frozen=True, slots=True, eq=False)
class CachedSlots:
    """The slots that the prefix cache holds."""

    slots: torch.Tensor  # int64[n], of the FULL slot space
    positions: torch.Tensor  # int64[n]
    spans: tuple[CachedSpan, ...]  # in order
    is_whole: bool  # False: the cache has more


class Surroundings(Protocol):
    """Used from the scheduler's thread only."""

    def request_in(self, row: int) -> RequestNow | None:
        """The request that `row` belongs to. None if it is not known."""

    def page_size(self) -> int:
        """Slots of a page of the allocator."""

    def cached_slots(self) -> CachedSlots | None:
        """None if the prefix cache holds nothing, or cannot be listed."""
