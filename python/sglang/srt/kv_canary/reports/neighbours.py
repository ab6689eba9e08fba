"""Finds the causes that bear on a cause: of its slot, of the slot before it, of its row entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..endpoint import CanaryLaunchTag
from ..pool_kind import PoolKind
from ..record import Mode, Reason
from .cause import Cause, family_of
from .evidence import Evidence, History, continues, is_same
from .violation import Violation

MAX_NOTED = 4096  # entries of each index; the oldest is forgotten
MAX_RUN = 64  # freed slots in a row that are followed back
MAX_ORIGINS = 8  # causes followed back to the one where it began

_CHANGED, _DOUBLE_FREE = (Reason.CONTENT.name,), (Reason.DOUBLE_FREE.name,)
_COUNTED = (_CHANGED, _DOUBLE_FREE)

K, V = TypeVar("K"), TypeVar("V")
Halves = Mapping[PoolKind, tuple[str, ...]]  # that each pool kind has

_WRONG_WRITES = frozenset(
    reason.name for reason in (Reason.WRITE_TOKEN, Reason.WRITE_POSITION, Reason.WRITE_LOCATION)
)
_LIFETIME = frozenset(
    reason.name for reason in (Reason.USE_AFTER_FREE, Reason.UNWRITTEN_SINCE_ALLOC)
)
# Kinds whose slots full slots name, each its own slots. Those for the fewest tokens come first.
_OF_FULL_SLOTS = (PoolKind.FULL, PoolKind.C4, PoolKind.C4_INDEXER, PoolKind.C128)
# Reasons that a wrong row entry, or a slot that changed hands, has in every pool kind
_OF_AN_ENTRY = frozenset(
    reason.name
    for reason in (
        Reason.NEVER_WRITTEN,
        Reason.USE_AFTER_FREE,
        Reason.UNWRITTEN_SINCE_ALLOC,
        Reason.POSITION,
        Reason.TOKEN,
        Reason.CHAIN,
        Reason.SLOT_OUT_OF_RANGE,
        Reason.UNMAPPED_SLOT,
        Reason.SWA_EVICTED_IN_WINDOW,
    )
)


@dataclass(slots=True)
class _Run:
    """Causes of neighbouring positions that one forward has found alike."""

    begin: Cause
    low: int
    high: int

    def take(self, position: int) -> bool:
        """Whether `position` continues it, at either end."""
        if not self.low - 1 <= position <= self.high + 1:
            return False
        self.low, self.high = min(self.low, position), max(self.high, position)
        return True


@dataclass(slots=True)
class Neighbours:
    """Finds related causes by slot, by row entry, and by the position that a slot holds instead."""

    halves: Halves = field(default_factory=dict)
    _at_slot: dict[tuple[PoolKind, int], Cause] = field(default_factory=dict)  # the newest cause
    _of_entry: dict[tuple[PoolKind, int], Cause] = field(default_factory=dict)
    _holding: dict[tuple[PoolKind, int, str | None, int], Cause] = field(default_factory=dict)
    _misplaced: dict[tuple[PoolKind, int], Cause] = field(default_factory=dict)  # with POSITION
    # Causes with these reasons alone, by reasons, pool kind and forward
    _alike: dict[tuple[tuple[str, ...], PoolKind, int], int] = field(default_factory=dict)
    _runs: dict[tuple[object, ...], _Run] = field(default_factory=dict)  # newest, by what is alike

    def note(self, cause: Cause) -> None:
        """A new cause. It takes the place of an older one of its slot."""
        v, kind = cause.first, cause.kind
        if v.slot is not None:
            earlier = self._at_slot.get((kind, v.slot))
            cause.earlier = None if earlier is None else earlier.first
            _put(self._at_slot, (kind, v.slot), cause)
        if v.full_slot is not None:
            _put(self._of_entry, (kind, v.full_slot), cause)
        if Reason.POSITION.name in v.reasons and v.stored_position is not None:
            _put(self._holding, _position_key(v, v.stored_position), cause)
            _put(self._misplaced, (kind, v.slot or 0), cause)
        if v.reasons in _COUNTED:
            key = v.reasons, kind, v.reader.forward
            _put(self._alike, key, self._alike.get(key, 0) + 1)
        self._note_run(cause)

    def _note_run(self, cause: Cause) -> None:
        v = cause.first
        position, family = v.position, family_of(v.reasons)
        if position is None or family is None:
            return
        is_own = is_same(v.writer, v.reader)
        key = cause.kind, v.reader.forward, v.reader.row, family, is_own
        run = self._runs.get(key)
        if run is not None and run.take(position):
            cause.run = run.begin
        else:
            _put(self._runs, key, _Run(cause, position, position))

    def join(self, cause: Cause, violation: Violation) -> None:
        """`cause` has reached another slot."""
        if violation.slot is not None:
            _put(self._at_slot, (cause.kind, violation.slot), cause)

    def evidence_of(self, cause: Cause, is_complete: bool, depth: int = MAX_ORIGINS) -> Evidence:
        """What is known of `cause` now. `is_complete`: as in `Evidence`."""
        same_slot = self._other_at_slot(cause)
        origin = None
        if _is_wrong_write(same_slot, cause.first):
            origin = Evidence(same_slot)
        elif arrived := _as_arrived(same_slot, cause.first):
            origin = arrived
        elif depth and (wrong := self._of_wrong_record(cause, is_complete)):
            origin = wrong
        elif depth and (other := self._in_full(cause) or self._before(cause) or _begin_of(cause)):
            origin = self.evidence_of(other, is_complete, depth - 1)
        return Evidence(
            first=cause.first,
            tags=tuple(cause.first_tags),
            readers=len(cause.readers),
            more_readers=cause.has_more_readers,
            history=cause.history,
            halves=self.halves.get(cause.kind, ()),
            is_complete=is_complete,
            same_slot=same_slot,
            swapped=self._swapped_with(cause),
            is_continuous=self._is_continuous(cause),
            origin=origin,
            moments=cause.moments or (),
            scene=cause.scene,
            changed_beside=self._found_beside(cause, _CHANGED),
            is_freed_in_full=bool(self._count(_DOUBLE_FREE, PoolKind.FULL, cause)),
            full_moments=cause.full_moments or (),
            is_full_checked=cause.kind is PoolKind.SWA and PoolKind.FULL in self.halves,
        )

    def _of_wrong_record(self, cause: Cause, is_complete: bool) -> Evidence | None:
        """Of changed bytes: the cause of their record, if that one alone has another position.

        Mode `partial` samples by position. Or the whole record is another one, with its fingerprint.
        """
        v = cause.first
        other = self._misplaced.get((cause.kind, v.slot or 0))
        if other is None or v.reasons != _CHANGED or v.tier is not None:
            return None
        theirs = other.first
        if (theirs.writer, theirs.stored_position) != (v.writer, v.stored_position):
            return None
        if cause.tags.keys() != other.tags.keys():
            return None
        found = self.evidence_of(other, is_complete, depth=0)
        return found if found.in_one_record else None

    def _found_beside(self, cause: Cause, reasons: tuple[str, ...]) -> int:
        """Other causes with `reasons` alone that the same forward found."""
        return self._count(reasons, cause.kind, cause) - (cause.first.reasons == reasons)

    def _count(self, reasons: tuple[str, ...], kind: PoolKind, cause: Cause) -> int:
        return self._alike.get((reasons, kind, cause.first.reader.forward), 0)

    def _other_at_slot(self, cause: Cause) -> Violation | None:
        if cause.first.slot is None:
            return None
        newest = self._at_slot.get((cause.kind, cause.first.slot))
        return cause.earlier if newest is None or newest is cause else newest.first

    def _in_full(self, cause: Cause) -> Cause | None:
        """The cause of the same row entry in a pool of full slots. The translation is then not at fault."""
        if cause.kind is PoolKind.FULL:
            return None
        kinds = _OF_FULL_SLOTS if cause.kind is PoolKind.SWA else (PoolKind.FULL,)
        return next((full for kind in kinds if (full := self._of_full_slot(kind, cause))), None)

    def _of_full_slot(self, kind: PoolKind, cause: Cause) -> Cause | None:
        """The cause of the row entry in `kind`. A compressed slot is freed with all of its tokens, so of a free also
        the cause of the entry that leads to the one of this token.
        """
        v = cause.first
        if v.full_slot is None:
            return None
        full = self._of_entry.get((kind, v.full_slot))
        if full is None:
            full = self._of_entry.get((kind, v.full_slot // kind.stride * kind.stride))
            if full is None or not _is_freed(full):
                return None
        if v.slot is None and full.first.reader.row != v.reader.row:
            return None
        return full if _goes_on(full, cause) else None

    def _before(self, cause: Cause) -> Cause | None:
        """The cause of the predecessor slot, if this slot itself is where and what it should be."""
        v = cause.first
        if v.reasons != (Reason.CHAIN.name,) or v.prev_slot is None:
            return None
        before = self._at_slot.get((cause.kind, v.prev_slot))
        if before is None or before is cause or cause.tags.keys().isdisjoint(before.tags):
            return None
        # Another request's slot behind one of the reader's own is wrong by itself.
        if Evidence(v).is_foreign and Evidence(before.first).is_own:
            return None
        return before if _goes_on(before, cause) else None

    def _is_continuous(self, cause: Cause) -> bool:
        """Whether a freed slot continues freed slots before it, back to one whose chain was checked.

        A check does not step from a freed record. But freed records keep their chains, and the causes have them.
        """
        run: list[Cause] = []
        while not (cause.is_continuous or continues(cause.first)):
            before = self._at_slot.get((cause.kind, cause.first.prev_slot or -1))
            if before is None or len(run) >= MAX_RUN or not continues(cause.first, before.first):
                return False
            if not (_goes_on(before, cause) and _is_freed(before) and _is_freed(cause)):
                return False
            run.append(cause)
            cause = before
        for known in run:
            known.is_continuous = True
        return True

    def _swapped_with(self, cause: Cause) -> Violation | None:
        """The finding about the slot that holds this position, if this slot holds that one's."""
        v = cause.first
        if v.expected_position is None:
            return None
        other = self._holding.get(_position_key(v, v.expected_position))
        if other is None or other is cause or not is_same(other.first.writer, v.reader):
            return None
        return other.first if other.first.expected_position == v.stored_position else None


def _is_freed(cause: Cause) -> bool:
    return not _LIFETIME.isdisjoint(cause.first.reasons)


def _goes_on(other: Cause, cause: Cause) -> bool:
    """Whether `other` was still found when `cause` was, and is about an entry, too."""
    ours, theirs = cause.first.reasons, other.first.reasons
    both = _OF_AN_ENTRY.issuperset(ours) and _OF_AN_ENTRY.issuperset(theirs)
    return both and other.last_forward >= cause.first.reader.forward


def _is_wrong_write(earlier: Violation | None, now: Violation) -> bool:
    """Whether `earlier` is about the wrong input of the forward that wrote what is found now."""
    if earlier is None or now.writer is None or _WRONG_WRITES.isdisjoint(earlier.reasons):
        return False
    return earlier.reader.forward == now.writer.forward


def _as_arrived(earlier: Violation | None, now: Violation) -> Evidence | None:
    """The wrong transfer into the slot, if `now` follows: a row that it makes another one, or a second free.

    A slot counts as free if the record of a free slot of the prefill server has arrived in it.
    """
    if earlier is None or earlier.reader.mode != Mode.ARRIVAL.name:
        return None
    found = Evidence(earlier, history=History(is_of_peer=_is_of_peer(earlier), was_sent=True))
    if Reason.ROW_CHAIN.name in now.reasons:
        return found if is_same(earlier.reader, now.reader) else None
    return found if Reason.DOUBLE_FREE.name in now.reasons and found.is_free_on_peer else None


def _is_of_peer(v: Violation) -> bool:
    """Whether the finding of an arrival is about a record that is still the prefill server's."""
    return v.writer is not None and v.writer.mode == Mode.EXTEND.name


def _begin_of(cause: Cause) -> Cause | None:
    """The cause at the beginning of the same damage, if more is known of it: not every slot is looked up."""
    begin = cause.run
    return begin if begin is not None and cause.moments is None and begin.moments else None


def _position_key(v: Violation, position: int) -> tuple[PoolKind, int, str | None, int]:
    return CanaryLaunchTag.kind_of(v.tag), v.reader.row, v.reader.request_id, position


def _put(index: dict[K, V], key: K, value: V) -> None:
    put_bounded(index, key, value, MAX_NOTED)


def put_bounded(index: dict[K, V], key: K, value: V, most: int) -> None:
    """Of `most` entries the oldest is forgotten."""
    if key not in index and len(index) >= most:
        index.pop(next(iter(index)))
    index[key] = value
