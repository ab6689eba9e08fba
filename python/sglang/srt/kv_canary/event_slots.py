"""The slots of several events as one tensor."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from .slot_event import SlotEvent

__all__ = ["COLUMNS", "SlotTable", "slots_of"]

COLUMNS = 4  # of a SlotTable: address, place among all slots, count, whether they are int64


def slots_of(events: Sequence[SlotEvent]) -> torch.Tensor | None:
    """The slots of all events, int64[n], one event's after the other's. None of none. On the current stream."""
    slots = [event.slots for event in events if event.slots is not None]
    if not slots:
        return None
    # A copy to the host that converts would wait for the device.
    return (slots[0] if len(slots) == 1 else torch.cat(slots)).to(torch.int64)


class SlotTable:
    """Says where the slots of events are, in host memory that a kernel reads."""

    MOST_EVENTS = 256

    __slots__ = ("_bytes", "_of_gpu", "events", "slots", "words")

    def __init__(self, pinned: bool) -> None:
        """`pinned`: so that a GPU reads it."""
        self.words = torch.zeros(
            self.MOST_EVENTS * COLUMNS, dtype=torch.int64, pin_memory=pinned
        )  # rows of COLUMNS
        self._bytes = memoryview(self.words.numpy()).cast("B")
        self._of_gpu = pinned
        self.events = self.slots = 0  # how many it lists

    def fill(self, lists: Sequence[torch.Tensor]) -> bool:
        """List these, int32 or int64 of its device without gaps. False: it cannot, and lists nothing."""
        if len(lists) > self.MOST_EVENTS:
            return False
        rows, place = array("q"), 0
        for slots in lists:
            dtype = slots.dtype
            if not slots.is_contiguous() or dtype not in _IS_WIDE:
                return False
            if slots.is_cuda is not self._of_gpu:
                return False
            count = slots.shape[0]
            rows.extend((slots.data_ptr(), place, count, _IS_WIDE[dtype]))
            place += count
        self._bytes[: COLUMNS * 8 * len(lists)] = memoryview(rows).cast("B")
        self.events, self.slots = len(lists), place
        return True


_IS_WIDE = {torch.int32: 0, torch.int64: 1}
