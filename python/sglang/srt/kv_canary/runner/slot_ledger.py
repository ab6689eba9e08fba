"""Events of the allocators since the last forward. They are applied on the forward stream before the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from types import ModuleType

import torch

from ..buffer_group import CanaryBufferGroup
from ..load_back import Landed, LoadBack
from ..pool_kind import PoolKind
from ..reports.slot_history import SlotHistory
from ..slot_event import MOST_CALLS, RecordMove, SlotCalls, SlotEvent, SlotEventKind
from ..state import CanaryDeviceState
from .borrowed_tensors import BorrowedTensors
from .joined_slots import JoinedSlots, Joining

# ALLOC events alone change nothing for a correct reader, so they wait for a FREE, up to this many.
MAX_WAITING_ALLOCS = 64

CopyRecords = Callable[[CanaryBufferGroup, torch.Tensor, torch.Tensor], None]
_Event = SlotEvent | LoadBack | RecordMove


class SlotLedger:
    """An ordered list of slot events of one manager."""

    def __init__(
        self,
        backend: ModuleType,
        groups: tuple[CanaryBufferGroup, ...],
        state: CanaryDeviceState,
        history: SlotHistory | None = None,
        copy_records: CopyRecords | None = None,
    ) -> None:
        """`copy_records`: copies all records of a group between slots; None: slots keep their numbers."""
        self._backend = backend
        self._copy_records = copy_records
        kinds = dict.fromkeys(group.allocator_kind for group in groups)
        self._groups = {
            kind: tuple(group for group in groups if group.allocator_kind is kind) for kind in kinds
        }
        self._state = state
        self._history = history
        if history is not None:
            history.catch_up, history.take_arrived = self.tell_history, self._let_go
        self._borrowed = BorrowedTensors()
        self._joins = JoinedSlots(backend, state.summary.device)
        self._joining: Joining | None = None  # of the events that are being applied
        self._told = 0  # waiting events that the history has
        self._call_ids: torch.Tensor | None = None  # 0, 1, ... on the device, made on first use
        self._events: list[_Event] = []
        self._landed: list[Landed] = []  # their bytes may still have been on the way
        # Slots were handed out to a load whose records are not recorded yet: nobody must check them.
        self.awaits_load_back = False
        self._must_apply = False
        self.loads_wait = False  # records of loaded slots are known and not written yet
        self._moves_wait = False
        self._unknown: set[PoolKind] = set()  # kinds that have lost events since their last CLEAR

    def record(
        self,
        kind: SlotEventKind,
        pool_kind: PoolKind,
        slots: torch.Tensor | None,
        page_size: int,
        step: int = 0,
        calls: SlotCalls = (),
    ) -> None:
        """Record an event of the allocator of `pool_kind` (FULL or SWA), for all groups whose slots it hands out.

        `slots` must not change afterwards: pass a copy of anything that SGLang may overwrite.
        `step` and `calls` are for the history.
        """
        if pool_kind not in self._groups:
            return
        if kind is SlotEventKind.CLEAR:
            self._unknown.discard(pool_kind)
        if pool_kind in self._unknown:
            return
        event = kind, pool_kind, slots, page_size, step, calls
        # Its own constructor is a function in Python
        self._events.append(tuple.__new__(SlotEvent, event))
        if kind is not SlotEventKind.ALLOC and kind is not SlotEventKind.LOAD:
            self._must_apply = True

    def record_load_back(self, load: LoadBack) -> None:
        """Record that records come into slots whose allocation has been recorded."""
        if load.pool_kind in self._groups and load.pool_kind not in self._unknown:
            self._events.append(load)
            self._must_apply = self.loads_wait = True

    def record_move(self, move: RecordMove) -> None:
        """Record that bytes go by other slots from now on. `move` must not change afterwards.

        The records follow in the order of the forwards: one that runs now still writes those of the old slots.
        """
        if move.pool_kind in self._groups and move.pool_kind not in self._unknown:
            self._events.append(move)
            self._must_apply = self._moves_wait = True

    def forget(self) -> None:
        """An event was lost, and later frees would look like double frees. So each pool waits for its CLEAR."""
        self._events, self._landed, self._must_apply, self._told = [], [], False, 0
        self.loads_wait = self._moves_wait = False
        self._unknown = set(self._groups)
        if self._history is not None:
            self._history.forget()

    @property
    def complete(self) -> bool:
        """Whether every event since the last CLEAR of its pool (or since the start) is known."""
        return not self._unknown

    @property
    def awaits_records(self) -> bool:
        """Whether the prefix cache may hold slots whose records or bytes have not come yet."""
        if self.awaits_load_back or self._moves_wait:
            return True
        return bool(self._landed) and any(each.load.bytes_are_awaited for each in self._landed)

    @property
    def may_apply(self) -> bool:
        """Whether `apply` has anything to do. Allocations alone wait, so in many steps it has nothing."""
        must = self._must_apply or self._landed
        return bool(must) or len(self._events) >= MAX_WAITING_ALLOCS

    @property
    def can_wait(self) -> bool:
        """Whether the next forward's layers may come before `apply`. What is loaded must be known when they begin."""
        return not (self.loads_wait or self._moves_wait or self._landed)

    @property
    def due(self) -> bool:
        """Whether `apply` has work to do."""
        must = self._must_apply or bool(self._landed)
        return (must or len(self._events) >= MAX_WAITING_ALLOCS) and self.complete

    def tell_history(self) -> None:
        """Give the history what waits: allocations may wait for long. On the current stream."""
        self._let_go()
        new = self._untold()
        if not new:
            return
        self._told = len(self._events)
        self._history.keep(new)
        slots = [event.slots for event in new if event.slots is not None]
        if slots:
            self._joining = Joining(None, self._history.written)
            self._borrow(slots)

    def _untold(self) -> list[SlotEvent]:
        """What the history does not have yet."""
        if self._history is None:
            return []
        return [event for event in self._events[self._told :] if type(event) is SlotEvent]

    def apply(self, at_once: bool = False) -> int:
        """Apply due events on the current stream, or `at_once` all of them. Returns the number of launches."""
        self._let_go()
        if not self.due and not (at_once and self._events and self.complete):
            return 0
        if self._told:
            self.tell_history()
        untold = self._history is not None and not self._told
        events, self._events = self._events, []
        self._must_apply, self._told = False, 0
        self.loads_wait = self._moves_wait = False
        launches = self._expose_late_writes()  # before the frees that followed them
        try:
            launches += self._apply_in_order(events, untold)
        finally:  # what is queued reads them even if a later launch fails
            self._borrow(list(_slots_of(events)))
        return launches

    def _borrow(self, tensors: list[torch.Tensor]) -> None:
        """What is queued reads these, and what joins them."""
        joining, self._joining = self._joining, None
        if not self._borrowed.keep(tensors, joining) and joining is not None:
            self._joins.give_back(joining, self._history)

    def _let_go(self) -> None:
        """Of what queued work has read. Never waits."""
        for _, joining in self._borrowed.take_done():
            if joining is not None:
                self._joins.give_back(joining, self._history)

    def _expose_late_writes(self) -> int:
        """Of loads whose bytes are there. Returns the number of launches."""
        landed, self._landed = self._landed, []
        for each in landed:
            if each.load.bytes_are_awaited:
                self._landed.append(each)
            else:
                each.expose_late_writes(self._backend)
                self._borrowed.keep(each.tensors)  # of the stream on which they landed
        return len(landed) - len(self._landed)

    def _apply_in_order(self, events: list[_Event], untold: bool) -> int:
        """Each pool kind's events in order. Returns the number of launches, at least. `untold`: the history lacks them.

        The slots of all events are joined once, for the history and for all launches.
        """
        kinds = dict.fromkeys([event.pool_kind for event in events])
        if len(kinds) > 1:
            events = [event for kind in kinds for event in events if event.pool_kind is kind]
        listed = [event for event in events if type(event) is SlotEvent]
        slots, self._joining = self._joins.of(listed, self._history if untold else None)
        launches = start = 0  # `start`: of the next event's slots
        for (kind, _), alike in groupby(events, _takes_turns):
            group = list(alike)
            if kind is not None:
                launches += self._apply_turns(group, slots, start)
            else:
                launches += sum(self._launch(event) for event in group)
            for event in group:
                if type(event) is SlotEvent and event.slots is not None:
                    start += event.slots.shape[0]  # `len` of a tensor is a function in Python
        return launches

    def _apply_turns(self, events: list[SlotEvent], slots: torch.Tensor, start: int) -> int:
        """ALLOCs and FREEs, whose slots begin at `start` of `slots`. Returns the number of launches, at least."""
        lengths = [event.slots.shape[0] for event in events]
        end = start + sum(lengths)
        own = slots if end - start == slots.shape[0] else slots[start:end]
        runs, calls = _runs_of(events, lengths)
        page_size = events[0].page_size
        call_ids = None
        if page_size > 1 and len(calls) > len(runs):
            call_ids = self._ids_of(calls, lengths, slots.device)
        groups = self._groups[events[0].pool_kind]
        for group in groups:
            self._backend.apply_slot_runs(runs, own, group, self._state, page_size, call_ids)
        return len(groups)

    def _launch(self, event: _Event) -> int:
        """Returns the number of launches."""
        if isinstance(event, LoadBack):
            self._landed.append(event.land(self._backend))
            return 1
        if isinstance(event, SlotEvent) and event.kind is SlotEventKind.LOAD:
            return 0  # it changes no record
        groups = self._groups[event.pool_kind]
        for group in groups:
            if isinstance(event, RecordMove):
                self._copy_records(group, event.sources, event.targets)
            else:
                self._backend.apply_slot_event(
                    event.kind, event.slots, group, self._state, event.page_size
                )
        return len(groups)

    def _ids_of(self, calls: list[int], lengths: list[int], device: torch.device) -> torch.Tensor:
        """int32[sum of `lengths`]: calls[i], repeated lengths[i] times. Copies nothing to the device."""
        if self._call_ids is None:
            self._call_ids = torch.arange(MOST_CALLS, dtype=torch.int32, device=device)
        known = zip(calls, lengths, strict=True)
        return torch.cat([self._call_ids[call : call + 1].expand(n) for call, n in known])


def _runs_of(
    events: list[SlotEvent], lengths: list[int]
) -> tuple[list[tuple[SlotEventKind, int]], list[int]]:
    """(runs of equal kinds with their numbers of slots, each event's number in its run)."""
    runs: list[tuple[SlotEventKind, int]] = []
    calls: list[int] = []
    call = 0
    for event, count in zip(events, lengths, strict=True):
        if runs and runs[-1][0] is event.kind and call + 1 < MOST_CALLS:
            call += 1
            runs[-1] = event.kind, runs[-1][1] + count
        else:
            call = 0
            runs.append((event.kind, count))
        calls.append(call)
    return runs, calls


def _slots_of(events: list[_Event]) -> Iterator[torch.Tensor]:
    for event in events:
        if isinstance(event, RecordMove):
            yield from (event.sources, event.targets)
        elif event.slots is not None:
            yield event.slots


def _takes_turns(event: _Event) -> tuple[PoolKind | None, int]:
    """Equal for neighbours that are applied together. (None, ...): launched one by one."""
    if type(event) is SlotEvent and event.kind <= SlotEventKind.FREE:
        return event.pool_kind, event.page_size
    return None, 0
