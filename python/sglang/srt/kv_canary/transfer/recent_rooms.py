"""Marks on requests whose transfer is under way."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["RecentRooms"]

MOST_MARKED = 4096  # as many requests as can be on their way by far


class RecentRooms:
    """Marks the latest requests, by what names their transfer. Transfer threads share it.

    A request that fails never takes its mark back. Its mark is let go as newer ones come.
    """

    def __init__(self) -> None:
        self._marked: OrderedDict[Hashable, None] = OrderedDict()  # oldest first
        self._lock = threading.Lock()

    def mark(self, room: Hashable) -> None:
        with self._lock:
            self._marked[room] = None
            self._marked.move_to_end(room)
            if len(self._marked) > MOST_MARKED:
                self._marked.popitem(last=False)

    def take(self, room: Hashable) -> bool:
        """Whether it is marked. It is not from then on."""
        with self._lock:
            return self._marked.pop(room, self) is None
