"""Endpoints: one (pool kind, half, side), the unit that is verified, written and counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

from .buffer_group import CanaryBufferGroup, PoolKind, Side

_TAGS_PER_KIND = 8


HALVES = ("K", "V")


class Part(IntFlag):
    """What a launch does of a forward's plan."""

    VERIFY = 1  # the prefixes
    WRITE = 2  # the new tokens
    NUMBER = 4  # HEAD gives the forward its number, TAIL marks it done
    ALL = VERIFY | WRITE | NUMBER


@dataclass(frozen=True, slots=True)
class CanaryLaunchTag:
    """The endpoint's name in counters and violations, e.g. TAIL_K_SWA; `id` is what the device stores."""

    kind: PoolKind
    half: str
    side: Side

    @property
    def id(self) -> int:
        return self.kind.index * _TAGS_PER_KIND + HALVES.index(self.half) * 4 + self.side.index

    @property
    def name(self) -> str:
        return f"{self.side.value}_{self.half}_{self.kind.value}"

    @staticmethod
    def kind_of(name: str) -> PoolKind:
        """The pool kind in a tag's name, or in the name that `free_tag_name` gives."""
        if name.startswith(_FREE):
            return PoolKind(name.removeprefix(_FREE))
        return PoolKind(name.split("_", 2)[2])

    @classmethod
    def from_id(cls, tag_id: int) -> CanaryLaunchTag:
        """Raises ValueError for an id that no tag has."""
        kind, rest = divmod(tag_id, _TAGS_PER_KIND)
        half, side = divmod(rest, 4)
        if not 0 <= kind < len(PoolKind) or side >= len(Side):
            raise ValueError(f"{tag_id} is no launch tag id")
        return cls(list(PoolKind)[kind], HALVES[half], list(Side)[side])


NUM_TAGS = len(PoolKind) * _TAGS_PER_KIND
_FREE = "FREE_"


def free_tag_name(kind: PoolKind) -> str:
    """What reports call the place of a double free: the allocator found it, no launch of a forward did."""
    return _FREE + kind.value


@dataclass(frozen=True, slots=True)
class CanaryEndpoint:
    """One endpoint of a group: what is checked and counted. One launch serves the endpoints of all halves."""

    tag: CanaryLaunchTag
    group: CanaryBufferGroup

    def launch_per_forward(self, launcher, plan) -> None:
        """Verify and write all halves of this endpoint's group and side, as far as `plan` has work for them."""
        launcher.launch(plan, self.group, self.tag.side)

    def launch_sweep(self, launcher, sweep_plan) -> None:
        """Verify the flat list `sweep_plan` against the records of all halves of this endpoint's group."""
        launcher.check_list(sweep_plan, self.group)


def build_endpoints_from_group(
    group: CanaryBufferGroup, sweep: bool = True
) -> tuple[CanaryEndpoint, ...]:
    """All endpoints of a group: HEAD and TAIL of each half, and SWEEP where a sweep can run."""
    sides = [Side.HEAD, Side.TAIL] + ([Side.SWEEP] if sweep else [])
    return tuple(
        CanaryEndpoint(CanaryLaunchTag(group.kind, half, side), group)
        for half in group.halves
        for side in sides
    )
