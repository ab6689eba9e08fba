"""The operations of an allocator on slots, in the allocator's order."""

from __future__ import annotations

from enum import IntEnum

MOST_CALLS = 1024  # maximum calls of the allocator merged in one event


class SlotEventKind(IntEnum):
    ALLOC = 0
    FREE = 1
    CLEAR = 2  # every slot came back
    UNFILL = 3  # the target writes these slots and the draft model may not follow
