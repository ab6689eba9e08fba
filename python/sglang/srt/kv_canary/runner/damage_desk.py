"""Findings that ask for an action: who has read damage, in which slots it lies, and which memory may be bad."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from ..buffer_group import CanaryBufferGroup
from ..endpoint import CanaryLaunchTag
from ..pool_kind import PoolKind, Side
from ..record import UNKNOWN, Column, Reason, is_writer_intact
from ..reports.complaints import Complaints
from ..reports.flight_recorder import FlightRecorder
from ..reports.violation import reason_names

__all__ = ["LOST", "Damage", "DamageDesk", "DamagedSlot", "Reader"]

# No request reads through a double free, and stale weights are a choice of the operator.
_REPORTED_ONLY = Reason.DOUBLE_FREE | Reason.STALE_WEIGHTS
# Slots of these kinds are FULL slots, or are mapped from one.
_COVERED = (PoolKind.FULL, PoolKind.SWA, PoolKind.INDEXER)
AFFECTED = ("aborted", "answered")  # what becomes of requests that read damage
ALLOCATOR_KINDS = ("FULL", "SWA")  # pool kinds whose slots can be withheld
MAX_CHANGES = 8  # of a slot that are remembered: the second one of a half decides
# Reason of a reader: what its forward found may have been overwritten unread
LOST = "FINDINGS_LOST"
MAX_REMEMBERED = 65536  # slots with findings; the oldest are forgotten


@dataclass(frozen=True, slots=True)
class Reader:
    """A request whose forward has read damage."""

    request_id: str
    row: int
    forward: int  # the first one that has read damage
    start: int  # first position that this forward computed
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DamagedSlot:
    """A slot of the FULL slot space that must leave the prefix cache."""

    slot: int
    writer: int  # writer word of its record when it was read
    changed: bool  # its own bytes are wrong, so whoever holds it now reads damage


@dataclass(frozen=True, slots=True)
class Damage:
    """Everything that was found since the last time."""

    readers: tuple[Reader, ...] = ()
    slots: tuple[DamagedSlot, ...] = ()
    bad_memory: tuple[tuple[str, int], ...] = ()  # (pool kind, slot): changed by itself twice
    tainted: tuple[int, ...] = ()  # full slots that the readers have computed from damage

    @classmethod
    def of_all(cls, parts: Iterable[Damage]) -> Damage:
        """What `parts` have found together. Of each reader, the first forward counts, and all reasons."""
        readers: dict[tuple[str, int], Reader] = {}
        slots: dict[tuple[int, int], DamagedSlot] = {}
        bad: dict[tuple[str, int], None] = {}
        tainted: set[int] = set()
        for part in parts:
            tainted.update(part.tainted)
            for reader in part.readers:
                known = readers.get((reader.request_id, reader.row))
                together = reader if known is None else _together(known, reader)
                readers[reader.request_id, reader.row] = together
            for slot in part.slots:
                known_slot = slots.get((slot.slot, slot.writer))
                if known_slot is None or slot.changed:
                    slots[slot.slot, slot.writer] = slot
            bad.update(dict.fromkeys(part.bad_memory))
        return cls(
            tuple(readers.values()), tuple(slots.values()), tuple(bad), tuple(sorted(tainted))
        )


_NOTHING = Damage()


@dataclass(slots=True)
class DamageDesk:
    """Belongs to the target runner's manager. Used from the scheduler's thread.

    `note_findings` takes what is reported. Between two steps, `take` hands it out.
    """

    recorder: FlightRecorder
    # bool[n] for rows of the ring: found in arrivals whose requests wait for it. Damage fails their transfers.
    are_awaited: Callable[[np.ndarray], np.ndarray] | None = None
    # Whether a request waits for what this forward finds
    awaits: Callable[[int], bool] = lambda forward: False
    outcomes: Counter[str] = field(default_factory=Counter)  # requests, by one of AFFECTED
    quarantined: int = 0  # cached tokens that a request still holds, and that nobody else can read
    withheld: Counter[str] = field(default_factory=Counter)  # slots, by pool kind
    groups: Sequence[CanaryBufferGroup] = ()  # of the runner
    on_found: Callable[[], None] = lambda: None  # called when something waits
    _pending: list[Damage] = field(default_factory=list)
    # With lost findings, since the last line about them
    _unsaid_forwards: set[int] = field(default_factory=set)
    _unsaid_requests: set[str] = field(default_factory=set)
    _complaints: Complaints = field(default_factory=Complaints)
    # (slot, writer word): a finding may come again when the slot has another owner
    _acted: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)
    # (pool kind, slot) -> its changes, each as (half, writer word, fingerprint of the bytes)
    _changes: OrderedDict[tuple[str, int], set[tuple[str, int, int]]] = field(
        default_factory=OrderedDict
    )

    def note_findings(self, rows: np.ndarray) -> None:
        """`rows` int64[n, len(Column)] of the ring are reported."""
        if not len(rows):
            return
        rows = rows[(rows[:, Column.REASONS] & ~int(_REPORTED_ONLY)) != 0]
        rows = rows[(rows[:, Column.REASONS] & int(Reason.DOUBLE_FREE)) == 0]
        if self.are_awaited is not None:
            rows = rows[~self.are_awaited(rows)]
        if not len(rows):
            return
        arrived = self._are(self._is_arrival, rows)
        slots, bad = self._slots(rows[~arrived])
        # What has arrived wrong was not changed by this memory.
        slots = (*slots, *self._slots(rows[arrived], were_here=False)[0])
        found = Damage(tuple(self._readers(rows)), slots, bad)
        if found != Damage():
            self._pending.append(found)
            self.on_found()

    def note_lost(self, lost: Sequence[tuple[int, int]]) -> None:
        """(Forward, row): what they have found may have been overwritten unread. They count as readers of damage."""
        readers = tuple(self._readers_of(lost))
        if readers:
            self._pending.append(Damage(readers))
            self._unsaid_forwards.update(reader.forward for reader in readers)
            self._unsaid_requests.update(reader.request_id for reader in readers)
            self.say_lost()
            self.on_found()

    def _readers_of(self, lost: Sequence[tuple[int, int]]) -> Iterable[Reader]:
        for forward, row in lost:
            request = self.recorder.request_id(forward, row)
            if request is not None and not self.awaits(forward):
                start = self.recorder.start_of(forward, row)
                yield Reader(request, row, forward, start, (LOST,))

    def say_lost(self) -> None:
        """Log what waits for it, at most once a minute. Called between steps: a burst may end within the minute."""
        forwards = self._unsaid_forwards
        if not (forwards and self._complaints.is_due):
            return
        self._complaints.log(
            f"action: findings were overwritten before they were read. Forwards: {len(forwards)} ({min(forwards)} "
            f"to {max(forwards)}). Requests: {len(self._unsaid_requests)}. What these requests have read is not "
            "known to be right, so they end. SGLANG_KV_CANARY_RING_CAPACITY is how many findings are kept"
        )
        forwards.clear()
        self._unsaid_requests.clear()

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending)

    def peek(self) -> Damage:
        """Everything that was found since `clear`."""
        return Damage.of_all(self._pending)

    def take(self) -> Damage:
        """The same, once. What fails to be dealt with is not found again in each step."""
        pending, self._pending = self._pending, []
        return Damage.of_all(pending)

    def clear(self, left: Damage = _NOTHING) -> None:
        """What `peek` returned is dealt with, but for `left`."""
        self._pending = [] if left == _NOTHING else [left]

    def forget_slots(self) -> None:
        """Findings about slots that `take` has handed out are new ones: an error keeps these slots in the cache."""
        self._acted.clear()

    @staticmethod
    def _are(test: Callable[[int], bool], rows: np.ndarray) -> np.ndarray:
        """bool[n]: whether `test` holds of the forward that found each of `rows`."""
        forwards = rows[:, Column.READER_FORWARD]
        chosen = [forward for forward in np.unique(forwards).tolist() if test(forward)]
        return np.isin(forwards, chosen)

    def _is_arrival(self, forward: int) -> bool:
        step = self.recorder.step_of(forward)
        return step is not None and bool(step.origins)

    def _readers(self, rows: np.ndarray) -> Iterable[Reader]:
        rows = rows[_mask(rows[:, Column.TAG], _reads)]
        columns = (Column.READER_FORWARD, Column.READER_ROW, Column.REASONS)
        for forward, row, reasons in np.unique(rows[:, columns], axis=0).tolist():
            request = self.recorder.request_id(forward, row)
            if request is not None:
                start = self.recorder.start_of(forward, row)
                yield Reader(request, row, forward, start, reason_names(reasons))

    def _slots(
        self, rows: np.ndarray, were_here: bool = True
    ) -> tuple[tuple[DamagedSlot, ...], tuple[tuple[str, int], ...]]:
        rows = rows[_mask(rows[:, Column.TAG], _is_covered)]
        columns = (
            Column.TAG,
            Column.REASONS,
            Column.SLOT,
            Column.FULL_SLOT,
            Column.WRITER,
            Column.EXPECTED_CONTENT,
        )
        slots, bad, end = {}, {}, self._num_full_slots()
        for tag_id, reasons, slot, full_slot, writer, content in np.unique(
            rows[:, columns], axis=0
        ).tolist():
            tag = CanaryLaunchTag.from_id(tag_id)
            changed = reasons == Reason.CONTENT
            # A SWA slot is damage to those only whose window holds it.
            alone = changed and tag.kind is not PoolKind.SWA
            for full in self._full_slots(tag, slot, full_slot):
                if not 0 < full < end or (full, writer) in self._acted:
                    continue
                before = slots.get((full, writer))
                if before is None or alone:
                    slots[full, writer] = DamagedSlot(full, writer, alone)
            known = (
                were_here
                and changed
                and slot > 0
                and is_writer_intact(writer)
                and content != UNKNOWN
            )
            if known and self._has_changed_twice(tag, slot, (tag.half, writer, content)):
                bad[_allocator_kind(tag.kind), slot] = None
        for full, writer in slots:
            self._remember(self._acted, (full, writer), None)
        return tuple(slots.values()), tuple(bad)

    def _num_full_slots(self) -> int:
        """A row may hold an index that is not in the pool."""
        full = (group.num_slots for group in self.groups if group.kind is PoolKind.FULL)
        return next(full, sys.maxsize)

    def _full_slots(self, tag: CanaryLaunchTag, slot: int, full_slot: int) -> Sequence[int]:
        """The FULL slots that a finding is about. A sweep lists SWA slots in their own space."""
        if tag.kind is not PoolKind.SWA:
            return (slot,)
        if tag.side is not Side.SWEEP or slot == UNKNOWN:
            return (full_slot,)
        group = next(group for group in self.groups if group.kind is PoolKind.SWA)
        if group.swa_index_lut is None:
            return (slot,)
        # Waits for the device: damage is no hot path.
        return (group.swa_index_lut == slot).nonzero().flatten().tolist()

    def _has_changed_twice(
        self, tag: CanaryLaunchTag, slot: int, change: tuple[str, int, int]
    ) -> bool:
        """Whether `change` is the second one of this half of the slot."""
        key = _allocator_kind(tag.kind), slot
        changes = self._changes.get(key)
        if changes is None:
            changes = set()
            self._remember(self._changes, key, changes)
        if change in changes or len(changes) >= MAX_CHANGES:
            return False
        changes.add(change)
        return sum(half == change[0] for half, _, _ in changes) == 2

    @staticmethod
    def _remember(memory: OrderedDict, key: object, value: object) -> None:
        memory[key] = value
        if len(memory) > MAX_REMEMBERED:
            memory.popitem(last=False)


def _together(one: Reader, other: Reader) -> Reader:
    first = one if one.forward <= other.forward else other
    if one.reasons == other.reasons:
        return first
    return replace(first, reasons=tuple(dict.fromkeys((*one.reasons, *other.reasons))))


def _allocator_kind(kind: PoolKind) -> str:
    """Of the allocator that hands out slots of `kind`, one of _COVERED."""
    return (PoolKind.SWA if kind is PoolKind.SWA else PoolKind.FULL).value


@cache
def _reads(tag_id: int) -> bool:
    """Whether a request's forward found it, rather than the sweep."""
    return CanaryLaunchTag.from_id(tag_id).side is not Side.SWEEP


@cache
def _is_covered(tag_id: int) -> bool:
    return CanaryLaunchTag.from_id(tag_id).kind in _COVERED


def _mask(tags: np.ndarray, test: object) -> np.ndarray:
    kinds: Sequence[int] = np.unique(tags).tolist()
    return np.isin(tags, [tag for tag in kinds if test(tag)])
