"""A bounded host ring of what the allocators did with each slot: who handed it out, who freed it, and when.

The launch that joins the slots of a step's events copies them to pinned memory, in the order of the forward stream.
Nothing is searched before a report asks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ..event_slots import slots_of
from ..pool_kind import PoolKind
from ..slot_event import CallSite, SlotEvent, SlotEventKind
from .slot_moment import SlotMoment

MAX_EVENTS = 16384
MAX_SHOWN = 6  # newest moments of a slot

# An event without its tensors: kind, pool kind (both as values), page size, step, and then its SlotCalls.
_Kept = tuple[int | str | None, ...]
_CALLS = 4  # where they begin
_CALLS_OF = attrgetter("calls")  # of an event


@dataclass(frozen=True, slots=True)
class _Index:
    """Of the ring, for look-ups."""

    arrived: int
    events: list[_Kept]
    starts: list[int]  # position of each event's first slot
    clears: list[int]  # indices of events without slots


class SlotHistory:
    """The newest `capacity` slots of events and the newest MAX_EVENTS events. Used from the scheduler's thread only."""

    def __init__(self, capacity: int, device: str, sites: Sequence[CallSite]) -> None:
        """`sites`: the call sites by their numbers. It may grow."""
        self._sites = sites
        self._cuda = torch.device(device).type == "cuda"
        self.ring = torch.zeros(capacity, dtype=torch.int64, pin_memory=self._cuda)
        self._kept: deque[_Kept] = deque(maxlen=MAX_EVENTS)
        self.written = 0  # slots so far; the ring has the newest ones
        self._arrived = 0  # of them, slots whose copy is known to be complete
        self._index: _Index | None = None
        # Makes the ledger that keeps it tell the events that wait there
        self.catch_up: Callable[[], None] = lambda: None
        # Makes it call `note_arrived` for what has arrived. Never waits
        self.take_arrived: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        """Host memory of the ring."""
        return self.ring.nbytes

    def forget(self) -> None:
        """An event was lost. What came before it would look like all that happened."""
        self._kept.clear()
        self._index = None

    def keep(self, events: Sequence[SlotEvent], slots: torch.Tensor | None = None) -> None:
        """Keep events in the order of the allocators. On the stream on which their slots may be read.

        `slots`: `slots_of(events)`, if it is known.
        """
        known = [event for event in events if event.calls]
        if slots is None or len(known) < len(events):
            slots = slots_of(known)
        self._note(known)
        if slots is not None:
            self._copy_slots(slots)

    def begin(self, events: Sequence[SlotEvent], count: int) -> int | None:
        """Keep events, whose `count` slots in all a launch copies to `ring`. Returns where the first one goes there.

        Call `note_arrived` once it has run. None: nothing was kept, see `keep`.
        """
        capacity = self.ring.shape[0]
        if count > capacity or not all(map(_CALLS_OF, events)):
            return None
        self._note(events)
        position, self.written = self.written, self.written + count
        return position % capacity

    def note_arrived(self, written: int) -> None:
        """The ring has the first `written` slots."""
        self._arrived = max(self._arrived, written)

    def _note(self, events: Sequence[SlotEvent]) -> None:
        self._index = None
        self._kept.extend(
            [(e.kind._value_, e.pool_kind._value_, e.page_size, e.step, *e.calls) for e in events]
        )

    def _copy_slots(self, slots: torch.Tensor) -> None:
        capacity = self.ring.shape[0]
        position, self.written = self.written, self.written + slots.shape[0]
        if slots.shape[0] > capacity:
            slots, position = slots[-capacity:], self.written - capacity
        room = capacity - position % capacity
        for part in (slots,) if slots.shape[0] <= room else (slots[:room], slots[room:]):
            at = position % capacity
            self.ring[at : at + part.shape[0]].copy_(part, non_blocking=True)
            position += part.shape[0]
        if not self._cuda:  # on a CPU a copy waits
            self.note_arrived(self.written)

    def of(self, kind: PoolKind, slot: int) -> tuple[SlotMoment, ...]:
        """The newest MAX_SHOWN events of a slot of the allocator of `kind`, oldest first. Never waits."""
        self.take_arrived()
        index = self._current_index()
        kept, starts = index.events, index.starts
        if not kept:
            return ()
        # (event, number of its call): a group of frees may list a slot twice
        found = {(i, 0) for i in index.clears if kept[i][1] == kind}
        for position, held in self._positions(kept[-1][2], slot):
            i = bisect_right(starts, position) - 1
            if i < 0 or position >= starts[i] + _count(kept[i]):
                continue
            event_kind, pool_kind, *_ = kept[i]
            # A free of a slot frees its page.
            is_of_slot = held == slot or event_kind == SlotEventKind.FREE
            if pool_kind == kind and is_of_slot:
                found.add((i, _call_at(kept[i][_CALLS:], position - starts[i])))
        newest = sorted(found)[-MAX_SHOWN:]
        return tuple(self._moment(kept[i], call) for i, call in newest)

    def _moment(self, event: _Kept, call: int) -> SlotMoment:
        kind, _, _, step, *calls = event
        count, site, request_id = calls[3 * call : 3 * call + 3]
        return SlotMoment(SlotEventKind(kind), step, count, self._sites[site], request_id)

    def _current_index(self) -> _Index:
        """The events whose slots are all in the ring. Made once for all look-ups of a step: there are many events."""
        if self._index is None or self._index.arrived != self._arrived:
            kept = list(self._kept)
            counts = np.array([_count(event) for event in kept], dtype=np.int64)
            starts = self.written - counts[::-1].cumsum()[::-1]
            first = np.searchsorted(starts, self.written - self.ring.shape[0])
            end = np.searchsorted(starts + counts, self._arrived, side="right")
            kept = kept[first:end]
            clears = np.flatnonzero(counts[first:end] == 0).tolist()
            self._index = _Index(self._arrived, kept, starts[first:end].tolist(), clears)
        return self._index

    def _positions(self, page_size: int, slot: int) -> Iterable[tuple[int, int]]:
        """(position, slot) of the slots of the page of `slot` in the ring, in the order of their events."""
        ring, capacity = self.ring.numpy(), self.ring.shape[0]
        ring = ring[: min(capacity, self.written)]
        is_in_page = ring == slot if page_size == 1 else ring // page_size == slot // page_size
        found = np.flatnonzero(is_in_page)
        turn = self.written - self.written % capacity
        positions = found + np.where(found < self.written % capacity, turn, turn - capacity)
        order = np.argsort(positions)
        return zip(positions[order].tolist(), ring[found[order]].tolist(), strict=True)


def _count(event: _Kept) -> int:
    """Of its slots in the ring."""
    return event[_CALLS] if len(event) == _CALLS + 3 else sum(event[_CALLS::3])


def _call_at(calls: Sequence[Any], offset: int) -> int:
    """The number of the call that listed the slot at `offset` of the event."""
    for number, count in enumerate(calls[::3]):
        if offset < count:
            return number
        offset -= count
    return len(calls) // 3 - 1
