"""Whether records can be believed: shared by the managers of a process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tracking:
    """Whether records still tell what slots hold. The managers of a process share it: chains lead from one to another.

    An error while slots are recorded leaves records that are out of date, and what they say of a slot would be a false
    alarm. So nothing is checked until every slot has come back to its allocator.
    """

    losses: int = 0
    until_restart: bool = False  # a captured graph lacks launches

    def lose(self, until_restart: bool) -> None:
        self.losses += 1
        self.until_restart |= until_restart
