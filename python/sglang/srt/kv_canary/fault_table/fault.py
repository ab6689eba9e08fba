"""A staged fault as data: the bug that happened, how SGLang is broken like that, and under which traffic."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ..reports.classify import BugClass
from .bench import Bench
from .traffic import Stage

__all__ = ["NotStaged", "StagedFault"]


@dataclass(frozen=True, slots=True)
class StagedFault:
    """One row of the table.

    `breaks` replaces parts of SGLang's own code in the scheduler process. `expected`: the class of bug that a right
    guess names. `gap`: why the canary cannot see it; "" if it must.
    """

    id: str
    issue: str  # public reference
    title: str
    setup: str  # of `setups.SETUPS`
    traffic: Callable[[Stage], Awaitable[None]]
    breaks: Callable[[Bench], None]
    expected: BugClass
    gap: str = ""


@dataclass(frozen=True, slots=True)
class NotStaged:
    """A class of bug that the table leaves out, and why."""

    issue: str
    title: str
    reason: str
