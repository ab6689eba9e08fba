"""The slots of a step's events, joined on the device and in the ring of the history by one launch."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from ..event_slots import SlotTable, slots_of
from ..reports.slot_history import SlotHistory
from ..slot_event import SlotEvent

TABLES = 8  # under way at once; a scheduler is ahead of the device by two forwards, as a rule
MOST_SLOTS = 16384  # that are joined where a launch before has joined others; for more torch allocates memory


class Joining:
    """What the device still reads to join slots, or writes to the history."""

    __slots__ = ("table", "written")

    def __init__(self, table: SlotTable | None, written: int) -> None:
        """`table`: None: torch joins. `written`: slots that the history has then; 0: it takes no part."""
        self.table, self.written = table, written


class JoinedSlots:
    """Joins slots on the current stream. Each join goes over the one before, which launches in between have read."""

    def __init__(self, backend: ModuleType, device: torch.device) -> None:
        self._join = backend.join_slots
        self._joined = torch.zeros(MOST_SLOTS, dtype=torch.int64, device=device)
        self._tables = [SlotTable(self._joined.is_cuda) for _ in range(TABLES)]

    def of(
        self, events: Sequence[SlotEvent], history: SlotHistory | None
    ) -> tuple[torch.Tensor | None, Joining | None]:
        """(the slots of all events, int64[n], None of none; what must be given back once the launch has run).

        `history`: keeps the events; None: it has them.
        """
        lists = [event.slots for event in events if event.slots is not None]
        table = self._tables[-1] if lists and self._tables else None
        if table is None or not table.fill(lists) or table.slots > MOST_SLOTS:
            return self._by_torch(events, history)
        ring, position, written = None, 0, 0
        if history is not None:
            ring, position = history.ring, history.begin(events, table.slots)
            if position is None:
                return self._by_torch(events, history)
            written = history.written
        self._join(table, self._joined, ring, position)
        self._tables.pop()
        return self._joined[: table.slots], Joining(table, written)

    @staticmethod
    def _by_torch(
        events: Sequence[SlotEvent], history: SlotHistory | None
    ) -> tuple[torch.Tensor | None, Joining | None]:
        slots = slots_of(events)
        if history is None:
            return slots, None
        history.keep(events, slots)
        return slots, None if slots is None else Joining(None, history.written)

    def give_back(self, joining: Joining, history: SlotHistory | None) -> None:
        """What it names has been read and written."""
        if joining.table is not None:
            self._tables.append(joining.table)
        if joining.written:
            history.note_arrived(joining.written)
