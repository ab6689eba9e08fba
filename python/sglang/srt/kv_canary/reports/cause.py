"""Causes: the findings of one fault, seen by several readers, in several halves and on several sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..endpoint import CanaryLaunchTag
from ..pool_kind import PoolKind, Side
from ..record import Reason
from .evidence import History, chunk_of
from .extent import MAX_SLOTS, Extent, parts_of
from .flight_recorder import FlightRecorder
from .scene import Pending, Scene
from .slot_moment import SlotMoment
from .story import Story
from .violation import HOST_TIER, Actor, Violation, render

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
    page: str | None = None  # outside the device pool

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
            _compared_by_all(v.reasons),
            _stamp(v.writer),
            _stamp(v.freed),
            None if v.slot else (v.full_slot, _reader(v.reader)),
            page=None if v.tier is None else v.page,
        )


_POSITION, _TOKEN, _CHAIN = Reason.POSITION.name, Reason.TOKEN.name, Reason.CHAIN.name
_FAMILIES = (
    frozenset({_POSITION, _TOKEN, _CHAIN}),  # another token
    frozenset(
        reason.name
        for reason in (
            Reason.NEVER_WRITTEN,
            Reason.USE_AFTER_FREE,
            Reason.UNWRITTEN_SINCE_ALLOC,
        )
    ),  # nothing
    frozenset({Reason.CONTENT.name}),  # other bytes
    frozenset({Reason.SWA_EVICTED_IN_WINDOW.name}),  # no slot
)


def _compared_by_all(reasons: tuple[str, ...]) -> tuple[str, ...]:
    """`reasons` without what only some forwards compare: not all of them know the expected token."""
    others = tuple(reason for reason in reasons if reason != _TOKEN)
    return others if not {_POSITION, _CHAIN}.isdisjoint(others) else reasons


def family_of(reasons: tuple[str, ...]) -> frozenset[str] | None:
    """Reasons that mean the same as `reasons`: another token, nothing, other bytes, or no slot. None: other things."""
    return next((family for family in _FAMILIES if family.issuperset(reasons)), None)


@dataclass(frozen=True, slots=True)
class CopyKey:
    """What findings must share that one copy of several slots has caused: a chunk of a transfer, or a write-back."""

    kind: PoolKind
    forward: int  # that checked what has arrived, or the last one before the check of host memory
    family: frozenset[str]  # see `family_of`
    part: tuple[
        object, ...
    ]  # reader's row and number of the chunk; in host memory, who wrote the slots

    @classmethod
    def of(cls, violation: Violation, recorder: FlightRecorder) -> CopyKey | None:
        """None: it was not found in what has just arrived, nor in host memory."""
        v = violation
        family = family_of(v.reasons)
        part = _part_of(v, recorder) if v.slot is not None else None
        if family is None or part is None:
            return None
        return cls(CanaryLaunchTag.kind_of(v.tag), v.reader.forward, family, part)


def _part_of(v: Violation, recorder: FlightRecorder) -> tuple[object, ...] | None:
    if v.tier == HOST_TIER:
        return v.tier, _stamp(v.writer)
    chunk = chunk_of(v, recorder) if _has_reader(v) and v.slot else None
    return None if chunk is None else (v.reader.row, chunk)


@dataclass(slots=True)
class Cause:
    """One cause and its findings so far."""

    number: int  # from 1, in the order of discovery
    first: Violation
    history: History = field(default_factory=History)
    earlier: Violation | None = None  # first finding of an older cause of the same slot
    run: Cause | None = (
        None  # of the same damage at the positions beside: the first of these causes
    )
    tags: dict[str, None] = field(default_factory=dict)  # in the order of discovery
    first_tags: dict[str, None] = field(default_factory=dict)  # of the forward that found it first
    readers: dict[Reader, Actor] = field(default_factory=dict)
    has_more_readers: bool = False
    findings: int = 0  # repeats included
    last_forward: int = 0
    is_in_part: bool = False  # other findings of the step that found it first were only counted
    events: int = 0  # violation events written
    reported: int = 0  # findings at the time of the last event about this cause
    readers_told: int = 0  # named in events; one more once an event says that there are more
    slots: set[int] = field(default_factory=set)
    has_more_slots: bool = False
    is_continuous: bool = False  # known to continue the reader's prefix through causes before it
    positions: tuple[int, int] | None = None  # first and last
    pending_scene: Pending | None = None
    scene: Scene | None = None  # the surroundings, for the first causes of a process
    has_snapshot: bool = False  # written, or tried to
    moments: tuple[SlotMoment, ...] | None = None  # of the slot, oldest first; None: not looked up
    # Of the full slot, where `moments` are those of the SWA slot that it was mapped to
    full_moments: tuple[SlotMoment, ...] | None = None

    @property
    def kind(self) -> PoolKind:
        return CanaryLaunchTag.kind_of(self.first.tag)

    @property
    def place(self) -> tuple[PoolKind, int] | None:
        """(pool kind of the allocator, slot), as the allocators know the slot. None without a slot."""
        v = self.first
        if v.tier is not None:  # such slots have numbers of their own
            return None
        if self.kind is PoolKind.SWA and v.slot:
            return PoolKind.SWA, v.slot
        if self.scene is not None and self.scene.mapping is not None and self.scene.mapping.then:
            return (
                PoolKind.SWA,
                self.scene.mapping.then,
            )  # evicted: what became of its SWA slot tells by whom
        slot = v.slot if self.kind is PoolKind.FULL else v.full_slot
        return (PoolKind.FULL, slot) if slot else None

    @property
    def full_place(self) -> tuple[PoolKind, int] | None:
        """The full slot of an evicted SWA slot: what became of it tells whether it was freed as a whole."""
        v = self.first
        is_evicted = Reason.SWA_EVICTED_IN_WINDOW.name in v.reasons and v.full_slot
        return (PoolKind.FULL, v.full_slot) if is_evicted else None

    @property
    def has_doubled(self) -> bool:
        """Whether findings have doubled since the last event."""
        return self.findings >= 2 * self.reported

    @property
    def has_untold_reader(self) -> bool:
        """Whether no event names one of its readers. Turns true at most MAX_READERS + 1 times."""
        return len(self.readers) + self.has_more_readers > self.readers_told

    def note_found_told(self) -> None:
        """An event was written about the last finding."""
        self.events += 1
        self.reported = self.findings
        self.readers_told = len(self.readers)

    def note_told(self) -> None:
        """An event was written about all of it."""
        self.reported = self.findings
        self.readers_told = len(self.readers) + self.has_more_readers

    def fold(self, violation: Violation) -> None:
        """Add a finding that is not a repeat."""
        self.findings += 1
        self.last_forward = violation.reader.forward
        self.tags[violation.tag] = None
        if violation.reader.forward == self.first.reader.forward:
            self.first_tags[violation.tag] = None
        self._widen(violation)
        if not _has_reader(violation):
            return
        reader = _reader(violation.reader)
        if reader not in self.readers and len(self.readers) >= MAX_READERS:
            self.has_more_readers = True
        else:
            self.readers.setdefault(reader, violation.reader)

    def _widen(self, v: Violation) -> None:
        if v.slot is not None and v.slot not in self.slots:
            if len(self.slots) < MAX_SLOTS:
                self.slots.add(v.slot)
            else:
                self.has_more_slots = True
        position = v.position
        if position is not None:
            low, high = self.positions or (position, position)
            self.positions = min(low, position), max(high, position)

    @property
    def extent(self) -> Extent:
        sides, halves, groups = parts_of(tuple(self.tags))
        low, high = self.positions or (None, None)
        return Extent(
            slots=len(self.slots),
            more_slots=self.has_more_slots,
            first_position=low,
            last_position=high,
            sides=sides,
            halves=halves,
            groups=groups,
            readers=len(self.readers),
            more_readers=self.has_more_readers,
            first_forward=self.first.reader.forward,
            last_forward=self.last_forward,
            findings=self.findings,
        )

    def report(self, story: Story) -> str:
        """The line for machines, then the report for people."""
        return f"{self.line()}\n{self.text(story)}"

    def line(self) -> str:
        """One line for log tools. -1 stands for an unknown number."""
        v = self.first
        return (
            f"kv_canary violation: launch_tag={v.tag} fail_reason={'+'.join(v.reasons)} "
            f"slot={_number(v.slot)} position={_number(v.position)}"
        )

    def text(self, story: Story) -> str:
        mine = _reader(self.first.reader) if _has_reader(self.first) else None
        others = [actor.text() for reader, actor in self.readers.items() if reader != mine]
        return render(
            self.first,
            sentence=story.sentence,
            guess=story.guess_text,
            extent=self.extent.text(tuple(self.tags)) if self.findings > 1 else "",
            other_readers=others[: READERS_SHOWN - 1],
            details=story.details(),
        )

    def snapshot(self, summary: dict[str, Any]) -> dict[str, Any]:
        """All that is known of the cause with a scene, JSON-ready. `summary`: the event about it."""
        return {
            "cause": self.number,
            "violation": self.first.as_event(),
            "summary": summary,
            "scene": None if self.scene is None else self.scene.as_dict(with_records=True),
        }

    def summary(self, story: Story) -> dict[str, Any]:
        """The event about the cause as a whole."""
        return {
            "event": "cause",
            "cause": self.number,
            "sentence": story.sentence or None,
            "guess": None if story.guess is None else story.guess.as_dict(),
            "reasons": list(self.first.reasons),
            "pool": self.kind.value,
            "slot": self.first.slot,
            "tier": self.first.tier,
            "key": self.first.key,
            "tags": list(self.tags),
            "findings": self.findings,
            "first_forward": self.first.reader.forward,
            "last_forward": self.last_forward,
            "extent": self.extent.as_dict(),
            "readers": [actor.as_dict() for actor in self.readers.values()],
            "more_readers": self.has_more_readers,
            "history": [moment.as_dict() for moment in story.history],
            "scene": None if story.scene is None else story.scene.as_dict(),
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
