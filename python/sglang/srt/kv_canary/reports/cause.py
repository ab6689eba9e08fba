"""Causes: the findings of one fault, seen by several readers, in several halves and on several sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..buffer_group import PoolKind, Side
from ..endpoint import CanaryLaunchTag
from ..record import Reason
from .violation import Actor, Violation, render

MAX_READERS = 64  # remembered per cause
READERS_SHOWN = 4  # in a report
MAX_EVENTS = 64  # violation events per cause; later ones are only counted

Stamp = tuple[int, int, str]  # forward, request row, forward mode
Reader = tuple[int, str | None]  # request row, request id


@dataclass(frozen=True, slots=True)
class CauseKey:
    """What two findings must share to have the same cause."""

    kind: PoolKind
    slot: int | None
    reasons: tuple[str, ...]
    writer: Stamp | None
    freed: Stamp | None
    # Full slot and reader, if the finding is not about a slot: then the fault lies in the request's inputs.
    given: tuple[int | None, Reader] | None
    # Version of the weights that wrote stale slots. All of them have one cause: the update without a flush.
    weights: int | None = None

    @classmethod
    def of(cls, violation: Violation) -> CauseKey:
        v = violation
        if Reason.STALE_WEIGHTS.name in v.reasons:
            version = None if v.writer_weights is None else v.writer_weights.number
            kind = CanaryLaunchTag.kind_of(v.tag)
            return cls(kind, None, v.reasons, None, None, None, version)
        return cls(
            CanaryLaunchTag.kind_of(v.tag),
            v.slot,
            v.reasons,
            _stamp(v.writer),
            _stamp(v.freed),
            None if v.slot else (v.full_slot, _reader(v.reader)),
        )


@dataclass(slots=True)
class Cause:
    """One cause and its findings so far."""

    number: int  # from 1, in the order of discovery
    first: Violation
    tags: dict[str, None] = field(default_factory=dict)  # in the order of discovery
    readers: dict[Reader, Actor] = field(default_factory=dict)
    has_more_readers: bool = False
    findings: int = 0  # repeats included
    last_forward: int = 0
    events: int = 0  # violation events written
    reported: int = 0  # findings at the time of the last event about this cause

    @property
    def has_doubled(self) -> bool:
        """Whether findings have doubled since the last event."""
        return self.findings >= 2 * self.reported

    def fold(self, violation: Violation) -> None:
        """Add a finding that is not a repeat."""
        self.findings += 1
        self.last_forward = violation.reader.forward
        self.tags[violation.tag] = None
        if not _has_reader(violation):
            return
        reader = _reader(violation.reader)
        if reader not in self.readers and len(self.readers) >= MAX_READERS:
            self.has_more_readers = True
        else:
            self.readers.setdefault(reader, violation.reader)

    def report(self) -> str:
        """The line for machines, then the report for people."""
        return f"{self.line()}\n{self.text()}"

    def line(self) -> str:
        """One line for log tools. -1 stands for an unknown number."""
        v = self.first
        position = v.stored_position if v.expected_position is None else v.expected_position
        return (
            f"kv_canary violation: launch_tag={v.tag} fail_reason={'+'.join(v.reasons)} "
            f"slot={_number(v.slot)} position={_number(position)}"
        )

    def text(self) -> str:
        seen_at = _folded(tuple(self.tags)) if len(self.tags) > 1 else ""
        mine = _reader(self.first.reader) if _has_reader(self.first) else None
        others = [actor.text() for reader, actor in self.readers.items() if reader != mine]
        shown, hidden = others[: READERS_SHOWN - 1], len(others[READERS_SHOWN - 1 :])
        if hidden:
            at_least = "at least " if self.has_more_readers else ""
            shown.append(f"and {at_least}{hidden} more reader{'s' * (hidden > 1)}")
        return render(self.first, seen_at, shown)

    def summary(self) -> dict[str, Any]:
        """The event that shows how a cause has grown."""
        return {
            "event": "cause",
            "cause": self.number,
            "reasons": list(self.first.reasons),
            "pool": CanaryLaunchTag.kind_of(self.first.tag).value,
            "slot": self.first.slot,
            "tags": list(self.tags),
            "findings": self.findings,
            "first_forward": self.first.reader.forward,
            "last_forward": self.last_forward,
            "readers": [actor.as_dict() for actor in self.readers.values()],
            "more_readers": self.has_more_readers,
        }


def _stamp(actor: Actor | None) -> Stamp | None:
    return None if actor is None else (actor.forward, actor.row, actor.mode)


def _reader(actor: Actor) -> Reader:
    return actor.row, actor.request_id


def _has_reader(violation: Violation) -> bool:
    """Whether a request's forward found it, rather than the sweep or the allocator."""
    return violation.tag.startswith((Side.HEAD.value, Side.TAIL.value))


def _number(value: int | None) -> int:
    return -1 if value is None else value


def _folded(tags: tuple[str, ...]) -> str:
    """`tags` of one pool kind. In words if they are all combinations of some sides and halves."""
    # Three parts each: the allocator finds alone what it finds, so its tag is never one of several.
    parts = [tag.split("_", 2) for tag in tags]
    sides = [side.value for side in Side if any(part[0] == side.value for part in parts)]
    halves = sorted({part[1] for part in parts})
    if len(tags) < len(sides) * len(halves):
        return ", ".join(tags)
    return f"{_and(sides)}, {_and(halves)} of {parts[0][2]}"


def _and(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
