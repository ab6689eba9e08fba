"""What is known of a cause at the time of its report. Sentence and guess are made from this alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..buffer_group import PoolKind, Side
from ..endpoint import CanaryLaunchTag
from ..record import CONTENT_BASE, Mode, Reason, chain_step, to_signed64, to_unsigned64
from .extent import parts_of
from .flight_recorder import FlightRecorder
from .violation import Actor, Violation

ALL_ZERO = to_signed64(CONTENT_BASE)  # fingerprint of a slot whose bytes are all zero


@dataclass(frozen=True, slots=True)
class History:
    """What the flight recorder knows of reader and writer, as of the cause's first finding."""

    before_forward: int | None = None  # the reader's forward before the one that found it
    before_mode: str | None = None
    writer_was_dead: bool = False  # when the writer stored, its request had already ended

    @classmethod
    def of(cls, violation: Violation, recorder: FlightRecorder) -> History:
        reader, writer = violation.reader, violation.writer
        before = recorder.previous_of(reader.forward, reader.row)
        dead = writer is not None and recorder.is_moot(writer.forward, writer.row)
        return cls(
            None if before is None else before.forward,
            None if before is None else before.mode,
            dead,
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """One cause, and what other causes say about it."""

    first: Violation
    tags: tuple[str, ...] = ()  # in the forward that found it; empty: that of `first`
    readers: int = 1  # distinct requests
    history: History = History()
    halves: tuple[str, ...] = ()  # that the pool kind has; empty: unknown
    is_complete: bool = False  # every endpoint of the forward that found it has been read
    same_slot: Violation | None = None  # another cause, of the same slot
    swapped: Violation | None = None  # another cause: the two slots hold each other's positions
    is_continuous: bool = False  # it continues the slots before it, which have causes of their own
    origin: Evidence | None = None  # the cause from which this one follows
    freed_for: str = ""  # why the slot was freed, such as "eviction"; empty: not known

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
        return is_same(self.first.writer, self.first.reader)

    @property
    def is_foreign(self) -> bool:
        """Whether it is on record that another request wrote the slot."""
        writer, reader = self.first.writer, self.first.reader
        named = writer is not None and writer.request_id is not None
        return named and reader.request_id is not None and not self.is_own

    @property
    def forwards_ago(self) -> int | None:
        """Forwards from the write to the read."""
        v = self.first
        return None if v.writer is None else v.reader.forward - v.writer.forward

    @property
    def read_between(self) -> bool:
        """Whether the reader ran between write and read, and found nothing."""
        before, writer = self.history.before_forward, self.first.writer
        return before is not None and writer is not None and writer.forward < before

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

    # What it holds

    @property
    def same_position(self) -> bool:
        v = self.first
        return v.stored_position is not None and v.stored_position == v.expected_position

    @property
    def same_chain(self) -> bool:
        """Whether the slot is known to continue the reader's prefix."""
        return self.is_continuous or continues(self.first)

    @property
    def one_bit_of_content(self) -> bool:
        """Whether the fingerprints differ in one bit. Other bytes would change many bits."""
        v = self.first
        if v.content_written is None or v.content_now is None:
            return False
        return to_unsigned64(v.content_written ^ v.content_now).bit_count() == 1


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


def is_same(one: Actor | None, other: Actor | None) -> bool:
    """Whether both are on record as the same request."""
    if one is None or other is None or one.request_id is None:
        return False
    return one.request_id == other.request_id
