"""Readings of the device's counters per launch tag, and their growth between two readings."""

from __future__ import annotations

from dataclasses import dataclass

from ..buffer_group import CanaryBufferGroup
from ..endpoint import CanaryLaunchTag, build_endpoints_from_group
from ..pool_kind import Side
from ..runner.step_observer import Summary
from ..state import TagCounter


@dataclass(frozen=True, slots=True)
class CountsBetween:
    """Two summaries, the earlier one first."""

    earlier: Summary
    later: Summary

    @property
    def steps(self) -> int:
        return self.later.step - self.earlier.step

    @property
    def forwards_launched(self) -> int:
        return self.later.forward_launched - self.earlier.forward_launched

    @property
    def abandoned(self) -> int:
        return self.later.abandoned - self.earlier.abandoned

    def grown(self, tag: CanaryLaunchTag, counter: TagCounter) -> int:
        """Growth of `counter` of `tag`."""
        before, after = self.earlier.counters, self.later.counters
        return int(after[tag.id, counter]) - int(before[tag.id, counter])

    def by_tag(self, tags: tuple[CanaryLaunchTag, ...], counter: TagCounter) -> dict[str, int]:
        """Growth of `counter` for each of `tags`, by the tag's name."""
        return {tag.name: self.grown(tag, counter) for tag in tags}

    def share(
        self, tags: tuple[CanaryLaunchTag, ...], counter: TagCounter, of: TagCounter
    ) -> float | None:
        """Growth of `counter` divided by that of `of`, summed over `tags`. None if `of` did not grow."""
        whole = sum(self.by_tag(tags, of).values())
        return sum(self.by_tag(tags, counter).values()) / whole if whole else None


def content_tags(groups: tuple[CanaryBufferGroup, ...]) -> tuple[CanaryLaunchTag, ...]:
    """Those at which forwards write and compare fingerprints: TAIL of each half that has content."""
    halves = ((group, half) for group in groups for half in group.halves if group.content(half))
    return tuple(CanaryLaunchTag(group.kind, half, Side.TAIL) for group, half in halves)


def tags_of(
    groups: tuple[CanaryBufferGroup, ...], sides: tuple[Side, ...]
) -> tuple[CanaryLaunchTag, ...]:
    """Launch tags of `groups` on `sides`."""
    endpoints = (e for group in groups for e in build_endpoints_from_group(group))
    return tuple(e.tag for e in endpoints if e.tag.side in sides)


PER_FORWARD = (Side.HEAD, Side.TAIL)
