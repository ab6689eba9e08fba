"""What an allocator can do to slots, in the order in which it did it."""

from __future__ import annotations

from enum import IntEnum

MOST_CALLS = 1024  # of the allocator that one event may stand for


class SlotEventKind(IntEnum):
    ALLOC = 0
    FREE = 1
    CLEAR = 2  # every slot came back
    UNFILL = 3  # the target writes these slots and the draft model may not follow
