"""Endpoints: one (pool kind, half, side) each. The endpoint is the unit that is verified, written and counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING

from .pool_kind import PoolKind, Side

if TYPE_CHECKING:  # a report is read where no torch is
    from .buffer_group import CanaryBufferGroup

TAGS_PER_KIND = 8


HALVES = ("K", "V")


class Part(IntFlag):
    """The parts of a forward's plan that a launch executes."""

    VERIFY = 1  # the prefixes
    WRITE = 2  # the new tokens
    NUMBER = 4  # HEAD assigns the forward number, TAIL marks the forward done
    NEW_CONTENT = 8  # TAIL: fingerprints of the new tokens' bytes, where WRITE is a part too
    ALL = VERIFY | WRITE | NUMBER | NEW_CONTENT

    def __and__(self, other: int) -> Part:
        """As IntFlag's, which looks the result up by three more calls of Python functions."""
        return _PARTS[self._value_ & int(other)]

    __rand__ = __and__


_PARTS = tuple(map(Part, range(Part.ALL + 1)))


@dataclass(frozen=True, slots=True)
class CanaryLaunchTag:
    """The endpoint's name in counters and violations, e.g. TAIL_K_SWA. The device stores `id`."""

    kind: PoolKind
    half: str
    side: Side

    @property
    def id(self) -> int:
        return self.kind.index * TAGS_PER_KIND + HALVES.index(self.half) * 4 + self.side.index

    @property
    def name(self) -> str:
        return f"{self.side.value}_{self.half}_{self.kind.value}"

    @staticmethod
    def kind_of(name: str) -> PoolKind:
        """The pool kind in a tag's name, or in a name from `free_tag_name`."""
        return PoolKind(CanaryLaunchTag.kind_name_of(name))

    @staticmethod
    def kind_name_of(name: str) -> str:
        """As `kind_of`, also for a kind of a later version."""
        if name.startswith(_FREE):
            return name.removeprefix(_FREE)
        return name.split("_", 2)[-1]

    @classmethod
    def from_id(cls, tag_id: int) -> CanaryLaunchTag:
        """Raises ValueError for an id without a tag."""
        kind, rest = divmod(tag_id, TAGS_PER_KIND)
        half, side = divmod(rest, 4)
        if not 0 <= kind < len(PoolKind) or side >= len(Side):
            raise ValueError(f"{tag_id} is not a launch tag id")
        return cls(list(PoolKind)[kind], HALVES[half], list(Side)[side])


NUM_TAGS = len(PoolKind) * TAGS_PER_KIND
_FREE = "FREE_"


def free_tag_name(kind: PoolKind) -> str:
    """The launch tag that reports show for a double free. The allocator finds those, not a forward's launch."""
    return _FREE + kind.value


@dataclass(frozen=True, slots=True)
class CanaryEndpoint:
    """One endpoint of a group, for checks and counters. One launch serves the endpoints of all halves."""

    tag: CanaryLaunchTag
    group: CanaryBufferGroup

    def launch_per_forward(self, launcher, plan) -> None:
        """Verify and write all halves of this endpoint's group and side, as far as `plan` has work."""
        launcher.launch(plan, self.tag.side, groups=(self.group,))

    def launch_sweep(self, launcher, sweep_plan) -> None:
        """Verify the flat list `sweep_plan`, for all halves of this endpoint's group."""
        launcher.check_list(sweep_plan, self.group)


def build_endpoints_from_group(
    group: CanaryBufferGroup, sweep: bool = True
) -> tuple[CanaryEndpoint, ...]:
    """All endpoints of a group: HEAD and TAIL of each half, and SWEEP if a sweep can run."""
    sides = [Side.HEAD, Side.TAIL] + ([Side.SWEEP] if sweep else [])
    return tuple(
        CanaryEndpoint(CanaryLaunchTag(group.kind, half, side), group)
        for half in group.halves
        for side in sides
    )
