"""Whether records can be trusted, shared by the managers of a process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tracking:
    """Whether records still describe their slots. The managers of a process share this: chains link their records.

    An error while slots are recorded leaves records out of date. Checking them would raise false alarms. So nothing is
    checked until every slot has returned to its allocator.
    """

    losses: int = 0
    until_restart: bool = False  # a captured graph lacks launches

    def lose(self, until_restart: bool) -> None:
        self.losses += 1
        self.until_restart |= until_restart
