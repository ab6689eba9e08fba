"""How far a cause reaches: slots, positions, endpoints, readers and forwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..endpoint import CanaryLaunchTag
from ..pool_kind import Side

MAX_SLOTS = 64  # distinct slots remembered per cause


@dataclass(frozen=True, slots=True)
class Extent:
    """The extent of a cause so far. Positions are None if no finding knows one."""

    slots: int  # distinct
    more_slots: bool  # there are more than `slots`
    first_position: int | None
    last_position: int | None
    sides: tuple[str, ...]  # HEAD, TAIL, SWEEP; FREE for the allocator
    halves: tuple[str, ...]  # K, V; none for the allocator
    groups: tuple[str, ...]  # pool kinds
    readers: int  # distinct requests
    more_readers: bool
    first_forward: int
    last_forward: int
    findings: int  # repeats included

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values}

    def text(self, tags: tuple[str, ...]) -> str:
        """One line. `tags`: the launch tags of the cause's findings."""
        parts = [f"{_count(self.slots, 'slot', self.more_slots)}{self._positions()}"]
        if not self.slots:
            parts = [f"no readable slot{self._positions()}"]
        parts.append(folded(tags))
        if self.readers:
            parts.append(_count(self.readers, "reader", self.more_readers))
        parts.append(_range("forward", self.first_forward, self.last_forward))
        parts.append(_count(self.findings, "finding"))
        return "; ".join(parts)

    def _positions(self) -> str:
        if self.first_position is None or self.last_position is None:
            return ""
        return f", {_range('position', self.first_position, self.last_position)}"


@lru_cache(maxsize=1024)
def parts_of(tags: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """(sides, halves, pool kinds) of launch tags, each without duplicates and in a fixed order."""
    split = [tag.split("_", 2) for tag in tags]
    order = [side.value for side in Side]
    sides = {part[0] for part in split}
    known = tuple(side for side in order if side in sides)
    halves = sorted({part[1] for part in split if len(part) == 3})
    kinds = dict.fromkeys(CanaryLaunchTag.kind_name_of("_".join(part)) for part in split)
    return known + tuple(sorted(sides.difference(order))), tuple(halves), tuple(kinds)


def folded(tags: tuple[str, ...]) -> str:
    """`tags` of one pool kind. In words if they are all combinations of some sides and halves."""
    sides, halves, kinds = parts_of(tags)
    if not halves or len(tags) < len(sides) * len(halves):
        return ", ".join(tags)
    return f"{_and(sides)}, {_and(halves)} of {kinds[0]}"


def _and(words: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _count(number: int, what: str, more: bool = False) -> str:
    return f"{'at least ' * more}{number} {what}{'s' * (number != 1)}"


def _range(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"
