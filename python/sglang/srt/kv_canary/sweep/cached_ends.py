"""Where prefixes end in a prefix cache whose nodes can be looked up by number, and not listed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["CachedEnds"]

MOST_KNOWN = 1 << 17  # nodes; 12 to 16 MB
MOST_UNKNOWN = 0.25  # of the slots that the cache holds


class CachedEnds:
    """Numbers of nodes, as inserts have told them, and how many slots the cache holds in nodes that none has told.

    Each node lies on the way to one that an insert ended at. So a walk finds all of them, but those that a split made
    above nodes that are evicted before a walk has come by.
    """

    def __init__(self) -> None:
        self.is_told = False  # whether inserts of the cache are followed
        # Those on the way, then those of inserts, oldest first. A plain dict takes the longer to find its first one the
        # more have been taken out before it
        self._known: OrderedDict[int, None] = OrderedDict()
        self._added = 0  # slots, since the begin of the last walk
        self._held = 0  # slots, at that time
        # Of walks that skip nodes without SWA slots (True), and of those that do not: whether the last one has missed
        # many slots. Then the cache is to be listed once, for their groups
        self.is_short = {True: False, False: False}

    def __len__(self) -> int:
        return len(self._known)

    def note_insert(self, node: int, added: int) -> None:
        """An insert has ended at `node`, and `added` slots are new in the cache."""
        self._added += added
        self._known[node] = None
        self._known.move_to_end(node)
        self._let_go()

    def note_way(self, nodes: Iterable[int]) -> None:
        """A walk has come by `nodes`. Those that are not known are let go before all others."""
        for node in nodes:
            if node not in self._known:
                self._known[node] = None
                self._known.move_to_end(node, last=False)
        self._let_go()

    def _let_go(self) -> None:
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def forget(self, node: int) -> None:
        """It has left the device."""
        self._known.pop(node, None)

    def begin_walk(self, held: int) -> list[int]:
        """The nodes to visit, newest first. The way to the end of a conversation leads by all of its turns.

        `held`: slots that the cache holds now.
        """
        self._held, self._added = held, 0
        return list(reversed(self._known))

    def end_walk(self, seen: int, held: int, swa_resident_only: bool) -> None:
        """A walk has come by `seen` slots, also by those that it skips. The cache holds `held` now."""
        evicted = max(0, self._held + self._added - held)  # some of them had not been visited
        missed = self._held - evicted - seen
        self.is_short[swa_resident_only] = missed > MOST_UNKNOWN * self._held
