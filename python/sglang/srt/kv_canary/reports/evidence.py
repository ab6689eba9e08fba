"""What is known of a cause at the time of its report. Sentence and guess are made from this alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..endpoint import CanaryLaunchTag
from ..pool_kind import PoolKind, Side
from ..record import CONTENT_BASE, Mode, Reason, chain_step, to_signed64, to_unsigned64
from ..slot_event import SlotEventKind
from .extent import parts_of
from .flight_recorder import FlightRecorder
from .scene import Scene
from .slot_moment import SlotMoment
from .violation import Actor, Violation

ALL_ZERO = to_signed64(CONTENT_BASE)  # fingerprint of a slot whose bytes are all zero
# SGLang's functions that free SWA slots through the mapping. The last one is the end of a group of such frees
FREES_SWA = frozenset({"free_swa", "free_swa_segment", "free_page_ids"})
_FREES = (SlotEventKind.FREE, SlotEventKind.CLEAR)
_SPECULATIVE = {mode.name for mode in (Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_DECODE)}


@dataclass(frozen=True, slots=True)
class History:
    """What the flight recorder knows of reader and writer, as of the cause's first finding."""

    before_forward: int | None = None  # the reader's forward before the one that found it
    before_mode: str | None = None
    before_step: int | None = None
    writer_was_dead: bool = False  # when the writer stored, its request had already ended
    # The writer has the reader's id, and gave its row back in between: the id was used again, or it was retracted
    is_earlier_run: bool = False
    is_row_shared: bool = False  # another request ran in the reader's row and has not given it back
    is_of_peer: bool = False  # a prefill server wrote the record, and no arrival has taken it over
    is_before_lost: bool = False  # findings of the reader's forward before were overwritten unread
    was_sent: bool = (
        False  # it was found on arrival, in what the prefill server says that it has sent
    )

    @classmethod
    def of(cls, violation: Violation, recorder: FlightRecorder, lost_until: int = -1) -> History:
        """`lost_until`: some findings of forwards up to this one are not known."""
        reader, writer = violation.reader, violation.writer
        before = recorder.previous_of(reader.forward, reader.row)
        dead = writer is not None and recorder.is_moot(writer.forward, writer.row)
        step = None if before is None else before.step
        return cls(
            None if before is None else before.forward,
            None if before is None else before.mode,
            None if step is None else step.step,
            dead,
            _is_earlier_run(violation, recorder),
            recorder.other_owner(reader.forward, reader.row) is not None,
            recorder.receives and writer is not None and writer.mode == Mode.EXTEND.name,
            before is not None and before.forward <= lost_until,
            chunk_of(violation, recorder) is not None,
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """One cause, and what other causes say about it."""

    first: Violation
    tags: tuple[str, ...] = ()  # in the forward that found it; empty: that of `first`
    readers: int = 1  # distinct requests
    more_readers: bool = False  # there are more than `readers`
    history: History = History()
    halves: tuple[str, ...] = ()  # that the pool kind has; empty: unknown
    is_complete: bool = False  # every endpoint of the forward that found it has been read
    same_slot: Violation | None = None  # another cause, of the same slot
    swapped: Violation | None = None  # another cause: the two slots hold each other's positions
    is_continuous: bool = False  # it continues the slots before it, which have causes of their own
    origin: Evidence | None = None  # the cause from which this one follows
    moments: tuple[SlotMoment, ...] = ()  # of the slot, oldest first; empty: not known
    scene: Scene | None = None
    changed_beside: int = 0  # other slots whose bytes the same forward found changed
    is_freed_in_full: bool = False  # that forward found a double free in the full pool, too
    full_moments: tuple[SlotMoment, ...] = ()  # as `moments`, of an evicted slot's full slot
    is_full_checked: bool = False  # in another pool, where a wrong full slot would have a cause

    @property
    def kind(self) -> PoolKind:
        return CanaryLaunchTag.kind_of(self.first.tag)

    def has(self, *reasons: Reason) -> bool:
        """Whether the cause has one of `reasons`."""
        return not _names(reasons).isdisjoint(self.first.reasons)

    def only(self, *reasons: Reason) -> bool:
        """Whether the cause has no other reasons than these."""
        return _names(reasons).issuperset(self.first.reasons)

    # Where it was seen

    @property
    def is_sweep(self) -> bool:
        """Whether the sweep found it first, so that there is no reader."""
        return self.first.tag.startswith(Side.SWEEP.value)

    @property
    def halves_seen(self) -> tuple[str, ...]:
        return parts_of(self.tags or (self.first.tag,))[1]

    @property
    def in_one_record(self) -> bool:
        """Whether one record of the slot disagrees with its other records, which were checked, too."""
        sides, halves, _ = parts_of(self.tags or (self.first.tag,))
        sides = tuple(side for side in sides if side != Side.SWEEP.value)
        if not self.is_complete or len(halves) > 1 or len(sides) > 1:
            return False
        # The other records may have been checked just before this forward wrote them.
        if self.forwards_ago == 0:
            return False
        return len(self.halves) > 1 or (len(self.halves) == 1 and len(sides) == 1)

    # Who wrote it, and when

    @property
    def is_own(self) -> bool:
        """Whether the reader itself wrote the slot."""
        return is_same(self.first.writer, self.first.reader) and not self.history.is_earlier_run

    @property
    def is_foreign(self) -> bool:
        """Whether it is on record that another request wrote the slot."""
        writer, reader = self.first.writer, self.first.reader
        named = writer is not None and writer.request_id is not None
        return named and reader.request_id is not None and not self.is_own

    @property
    def forwards_ago(self) -> int | None:
        """Forwards from the write to the read. None: not known. A prefill server counts alone."""
        v = self.first
        if v.writer is None or self.history.is_of_peer:
            return None
        ago = v.reader.forward - v.writer.forward
        # What is loaded before the first forward after a weight update names that forward
        return 1 if ago == 0 and v.writer.mode == Mode.LOADED.name else ago

    @property
    def read_between(self) -> bool:
        """Whether the reader ran between write and read, and found nothing."""
        before, writer = self.history.before_forward, self.first.writer
        if before is None or writer is None or self.history.is_before_lost:
            return False
        return writer.forward < before

    @property
    def written_since(self) -> bool:
        """Whether the slot was written after the reader's last check of its prefix."""
        before, writer = self.history.before_forward, self.first.writer
        if before is None or writer is None:
            return False
        # A decode checks the prefix before anything is written. A prefill may write the position itself.
        checked = self.history.before_mode == Mode.DECODE.name
        return writer.forward > before or (checked and writer.forward == before)

    @property
    def freed_before(self) -> Violation | None:
        """The earlier cause of this slot that saw it freed before it was written."""
        earlier, writer = self.same_slot, self.first.writer
        if earlier is None or earlier.freed is None or writer is None:
            return None
        came_first = earlier.reader.forward <= self.first.reader.forward
        return earlier if came_first and earlier.freed.forward <= writer.forward else None

    @property
    def was_held(self) -> bool:
        """Whether the reader had its own prefix in the slot when it was found freed."""
        earlier = self.freed_before
        if earlier is None or not is_same(earlier.reader, self.first.reader):
            return False
        return Evidence(earlier).same_position and Evidence(earlier).same_chain

    # What the allocators did with the slot

    @property
    def freed_for(self) -> str:
        """Why the slot was freed when its record says that it was, such as "eviction". Empty: not known."""
        freed = self.first.freed
        if freed is None or freed.step is None:
            return ""
        frees = [m for m in self.moments if m.kind is SlotEventKind.FREE and m.step == freed.step]
        return frees[-1].site.purpose if frees and frees[-1].site is not None else ""

    @property
    def _before_read(self) -> list[SlotMoment]:
        return _before(self.moments, self.first.reader.step)

    @property
    def _kinds(self) -> list[SlotEventKind]:
        return [moment.kind for moment in self._before_read]

    @property
    def last_kind(self) -> SlotEventKind | None:
        """The last thing that the allocators did with the slot before it was read. None: not known."""
        kinds = self._kinds
        return kinds[-1] if kinds else None

    @property
    def was_handed_out(self) -> bool:
        """Whether the slot was in somebody's hands when it was read."""
        return self.last_kind is SlotEventKind.ALLOC

    @property
    def was_free(self) -> bool:
        """Whether the slot was in nobody's hands when it was read."""
        return self.last_kind in _FREES

    @property
    def was_filled(self) -> bool:
        """Whether K and V came into the slot from elsewhere before it was read."""
        return self.last_kind is SlotEventKind.LOAD

    @property
    def _full_is_fine(self) -> bool:
        """Whether the record of an evicted slot's full slot was checked, and is the reader's."""
        return self.is_full_checked and self.is_complete

    @property
    def full_freed_at(self) -> int | None:
        """The step after which the full slot of an evicted slot was freed, if it was in nobody's hands when read."""
        last = _before(self.full_moments, self.first.reader.step)[-1:]
        return last[0].step if last and last[0].kind in _FREES else None

    @property
    def was_freed_with_full(self) -> bool:
        """Whether that was after the reader's forward before, which read the slot, too.

        Its record says so to a forward that checks it. The budget may have left it out.
        """
        freed, after = self.full_freed_at, self.history.before_step
        return None not in (freed, after) and freed >= after

    @property
    def is_full_free(self) -> bool:
        """Whether it was in nobody's hands, and no record of it says that it is the reader's."""
        return self.full_freed_at is not None and not self._full_is_fine

    @property
    def is_full_intact(self) -> bool:
        """Whether the full slot of an evicted slot is known to be the reader's, by its record or its place."""
        last = _before(self.full_moments, self.first.reader.step)[-1:]
        is_held = bool(last) and last[0].kind in (SlotEventKind.ALLOC, SlotEventKind.LOAD)
        in_line = self.scene is not None and self.scene.is_in_line
        return self._full_is_fine or (is_held and in_line)

    @property
    def is_arrival(self) -> bool:
        """Whether it was found on arrival, in what has arrived and not in a cached prefix."""
        if self.first.reader.mode != Mode.ARRIVAL.name:
            return False
        writer = self.first.writer
        came = writer is not None and writer.mode == Mode.ARRIVAL.name and self.forwards_ago == 0
        return came or self.was_filled or self.history.was_sent

    @property
    def is_free_on_peer(self) -> bool:
        """Whether the record of a free slot has arrived. Here, slots are handed out before anything arrives."""
        return self.is_arrival and self.history.is_of_peer and self.has(Reason.USE_AFTER_FREE)

    @property
    def is_of_earlier_owner(self) -> bool:
        """Whether the slot may be new to its reader: another one wrote it, and it was handed out again since."""
        return self.is_foreign and self.was_handed_out and self.history.before_forward is None

    @property
    def was_freed_through_mapping(self) -> bool:
        """Of an SWA slot that was freed twice: whether the second free went through the full-to-SWA mapping."""
        step = self.first.reader.step
        frees = [m for m in self.moments if m.kind is SlotEventKind.FREE and m.step == step]
        sites = [m.site for m in frees if m.site is not None]
        return any(not FREES_SWA.isdisjoint(site.functions) for site in sites)

    @property
    def was_freed_between(self) -> bool:
        """Whether the slot was freed after the reader's last forward and before the writer stored to it."""
        after, writer = self.history.before_step, self.first.writer
        if after is None or writer is None or writer.step is None:
            return False
        return any(m.kind in _FREES and after <= m.step < writer.step for m in self.moments)

    @property
    def is_handed_out_twice(self) -> bool:
        """Whether the slot was handed out twice before it was read, without a free in between."""
        return self._kinds[-2:] == [SlotEventKind.ALLOC] * 2

    @property
    def is_handed_out_filled(self) -> bool:
        """Whether the slot was handed out after it was filled from elsewhere, without a free in between."""
        return self._kinds[-2:] == [SlotEventKind.LOAD, SlotEventKind.ALLOC]

    @property
    def was_freed_unfilled(self) -> bool:
        """Whether the slot was free when it was filled, and handed out after that."""
        return self.is_handed_out_filled and self._kinds[-3:-2] == [SlotEventKind.FREE]

    @property
    def is_anothers(self) -> bool:
        """Whether the slot was handed out last for another request than its reader."""
        reader = self.first.reader.request_id
        given = [m.request_id for m in self._before_read if m.kind is SlotEventKind.ALLOC]
        return bool(given) and None not in (reader, given[-1]) and given[-1] != reader

    # What lay around the slot

    @property
    def was_read_before(self) -> bool:
        """Whether the reader's forward before read the position, too, and found nothing."""
        return self.scene is not None and self.scene.last_read is not None

    @property
    def is_misfilled(self) -> bool:
        """Whether the slot was filled from elsewhere for this position, as the prefix cache has it, too."""
        return self.was_filled and self.is_cached_there

    @property
    def is_cached_there(self) -> bool:
        """Whether the prefix cache holds the slot at the reader's position, as the reader's row does."""
        return self.scene is not None and self.scene.is_cached_there

    @property
    def is_elsewhere(self) -> bool:
        """Whether the reader has stored the position in another slot, which is intact."""
        modes = {self.first.reader.mode, self.history.before_mode}
        # With speculation the other slot may be a rejected draft's.
        return bool(self.scene and self.scene.elsewhere) and modes.isdisjoint(_SPECULATIVE)

    @property
    def diverges_before(self) -> bool:
        """Of a slot with the reader's position and token: whether an entry before it leads to others."""
        return self.scene is not None and bool(self.scene.diverges)

    @property
    def is_repeated(self) -> bool:
        """Whether the reader's row leads to the slot at several positions."""
        return self.scene is not None and self.scene.is_repeated

    @property
    def one_word(self) -> bool:
        """Whether the change of a single word explains the new fingerprint."""
        return self.scene is not None and bool(self.scene.changed)

    # What it holds

    @property
    def same_position(self) -> bool:
        v = self.first
        return v.stored_position is not None and v.stored_position == v.expected_position

    @property
    def has_other_token(self) -> bool:
        """Whether both tokens are known and differ, whatever else was found."""
        v = self.first
        return None not in (v.expected_token, v.stored_token) and v.stored_token != v.expected_token

    @property
    def begins_elsewhere(self) -> bool:
        """Whether it is a prefix's first slot, whose chain alone is wrong: it has another token or namespace."""
        at_first = self.same_position and self.first.stored_position == 0
        return at_first and self.has(Reason.CHAIN) and self.only(Reason.CHAIN)

    @property
    def same_chain(self) -> bool:
        """Whether the slot is known to continue the reader's prefix."""
        return self.is_continuous or continues(self.first)

    @property
    def wrong_record(self) -> Evidence | None:
        """Of bytes that seem to have changed: what is known of their record, if that is what has changed."""
        origin = self.origin
        if origin is None or not self.only(Reason.CONTENT) or not origin.has(Reason.POSITION):
            return None
        return origin if origin.first.slot == self.first.slot else None

    @property
    def one_bit_of_content(self) -> bool:
        """Whether the fingerprints differ in one bit. Other bytes would change many bits."""
        v = self.first
        if v.content_written is None or v.content_now is None:
            return False
        return to_unsigned64(v.content_written ^ v.content_now).bit_count() == 1


def _before(moments: tuple[SlotMoment, ...], step: int | None) -> list[SlotMoment]:
    return [m for m in moments if step is not None and m.step < step]


def chunk_of(v: Violation, recorder: FlightRecorder) -> int | None:
    """Number of the chunk that should have brought what an arrival's check finds wrong. None: not known to be sent."""
    if v.reader.mode != Mode.ARRIVAL.name:
        return None
    kind = CanaryLaunchTag.kind_of(v.tag)
    return recorder.chunk(v.reader.forward, v.reader.row, v.position, kind)


@cache
def _names(reasons: tuple[Reason, ...]) -> frozenset[str]:
    return frozenset(reason.name for reason in reasons)


def continues(v: Violation, before: Violation | None = None) -> bool:
    """Whether the slot continues its predecessor, or what the finding `before` says about that one."""
    if before is None:
        return v.stored_chain is not None and v.stored_chain == v.expected_chain
    if None in (v.stored_chain, v.stored_token, v.stored_position, before.stored_chain):
        return False
    return v.stored_chain == chain_step(before.stored_chain, v.stored_token, v.stored_position)


def _is_earlier_run(v: Violation, recorder: FlightRecorder) -> bool:
    reader, writer = v.reader, v.writer
    if writer is None or not is_same(writer, reader):
        return False
    if writer.row != reader.row:
        return True
    # What is no longer known is not claimed
    return bool(recorder.was_released(reader.row, writer.forward, reader.forward))


def is_same(one: Actor | None, other: Actor | None) -> bool:
    """Whether both are on record as the same request."""
    if one is None or other is None or one.request_id is None:
        return False
    return one.request_id == other.request_id
