"""The operations of an allocator on slots, in the allocator's order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from .pool_kind import PoolKind

if TYPE_CHECKING:
    import torch

MOST_CALLS = 1024  # maximum calls of the allocator merged in one event


class SlotEventKind(IntEnum):
    ALLOC = 0
    FREE = 1
    CLEAR = 2  # every slot came back
    UNFILL = 3  # the target writes these slots and the draft model may not follow
    LOAD = 4  # K and V come from elsewhere: for the history only


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where an allocator was called. Kept once for each distinct stack."""

    purpose: str  # e.g. "eviction"; "" where it is not known
    functions: tuple[str, ...]  # innermost first


# The calls of an allocator that make up an event, several for a free group. For each, one after the other: number of
# slots, number of the call site, request id. Python's garbage collector does not follow plain tuples of such values.
SlotCalls = tuple[int | str | None, ...]


class SlotEvent(NamedTuple):
    """One event of an allocator. A tuple, because a step has dozens: a frozen dataclass takes four times as long."""

    kind: SlotEventKind
    pool_kind: PoolKind  # of the allocator, FULL or SWA
    slots: torch.Tensor | None  # in the allocator's slot space; None for CLEAR
    page_size: int
    step: int = 0  # the scheduler's step before it
    calls: SlotCalls = ()  # in the order of `slots`; empty: not known


@dataclass(frozen=True, slots=True)
class RecordMove:
    """Slots whose bytes go by other numbers from now on. The bytes stay where they are."""

    pool_kind: PoolKind  # of the allocator
    sources: torch.Tensor  # int64[n], in the allocator's slot space
    targets: torch.Tensor  # the same, disjoint from `sources`
