"""What the host knows of every state slot of a linear-attention pool, and what it finds wrong.

A state has no slot per token: each forward overwrites it. So a record says whose state it is and which tokens it has
absorbed. Only a state at rest, that is one in the prefix cache, has a fingerprint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from ..plan.host_chain import chain_of_tokens
from ..record import Reason
from ..reports.state_finding import StateFinding
from ..reports.violation import Actor


class Holder(str, Enum):
    """Who may use a state slot."""

    NOBODY = "FREE"
    CALLER = "HANDED_OUT"  # no forward has used it since
    REQUEST = "REQUEST"
    CACHE = "CACHED"
    UNKNOWN = "UNKNOWN"  # events were lost, or its user is not followed: not checked until handed out again


@dataclass(slots=True)
class StateRecord:
    """One state slot. `chain` covers the first `chained` of the `position` tokens that the state has absorbed."""

    holder: Holder = Holder.NOBODY
    owner: object = None  # the request
    position: int = 0
    chain: int | None = None  # None: not known
    chained: int = 0
    content: int | None = None  # fingerprint at rest; None: not taken
    writer: Actor | None = None  # of the last forward but decodes of the same request
    freed: Actor | None = None

    def absorb(self, tokens: Sequence[int] | None, before: int, after: int) -> None:
        """The state absorbs the tokens from `before` to `after`. `tokens` None: the host does not have them."""
        if tokens is not None and self.chain is not None and self.chained == before:
            self.chain, self.chained = chain_of_tokens(tokens, self.chain, before), after
        self.position, self.content = after, None


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens from position 0 on, in a namespace."""

    tokens: Sequence[int]
    anchor: int

    def chain(self, start: int = 0, before: int | None = None, stop: int | None = None) -> int:
        """Chain of the first `stop` tokens. `before`: that of the first `start`, if it is known."""
        before = self.anchor if before is None else before
        return chain_of_tokens(self.tokens[start:stop], before, start)


@dataclass(frozen=True, slots=True)
class Use:
    """One request of a forward."""

    owner: object  # the request; None: it is not followed
    reader: Actor
    before: int  # tokens of the request before the forward
    after: int
    tokens: Sequence[int] | None  # the new ones; None: the host does not have them yet
    anchor: int


@dataclass(frozen=True, slots=True)
class Track:
    """A snapshot that a forward takes of one request's state, `position` tokens from the request's start."""

    use: Use
    position: int


class StateLedger:
    """Events of the pool, the prefix cache and the forwards, in the order of the scheduler's program.

    Slot 0 is SGLang's padding slot. Not thread-safe. After a finding, later correct uses are still correct.
    """

    def __init__(
        self, num_slots: int, of_zeros: int | None, found: Callable[[StateFinding], None]
    ) -> None:
        """`num_slots`: slot 0 included. `of_zeros`: fingerprint of a state of zeros; None: not known."""
        self._of_zeros = of_zeros
        self._found = found
        self.checks: Counter[str] = Counter()  # what was checked, by kind of event
        self._at_rest: set[int] = set()  # slots that may be in the prefix cache, with a fingerprint
        self.num_slots = num_slots
        self._records: list[StateRecord] = []
        # Decodes are compared with these, a batch at once. Of slots that a request holds: its id, 0 for none, and the
        # position from which it goes on, which may be ahead of the record's
        self._owners = np.zeros(num_slots, dtype=np.int64)
        self._next = np.zeros(num_slots, dtype=np.int64)
        self._set_all(Holder.NOBODY)

    def record(self, slot: int) -> StateRecord:
        """Of slot 0 <= slot < num_slots, now."""
        held = self._records[slot]
        if self._owners[slot] and self._next[slot] != held.position:
            held.position, held.content = int(self._next[slot]), None
        return held

    def _set(self, slot: int, record: StateRecord) -> None:
        self._records[slot] = record
        self._note_owner(slot)

    def _note_owner(self, slot: int) -> None:
        """The slot's record has changed."""
        held = self._records[slot]
        is_held = held.holder is Holder.REQUEST and held.owner is not None
        self._owners[slot], self._next[slot] = id(held.owner) if is_held else 0, held.position

    def _set_all(self, holder: Holder) -> None:
        self._records = [StateRecord(holder) for _ in range(self.num_slots)]
        self._owners[:] = 0

    def forget(self) -> None:
        """Events were lost. Slots are not checked until they are handed out again."""
        self._set_all(Holder.UNKNOWN)

    # Pool

    def handed_out(self, slots: Sequence[int]) -> None:
        """SGLang zeroes them."""
        for slot in slots:
            self._set(slot, StateRecord(Holder.CALLER))

    def freed(self, slots: Sequence[int], by: Actor) -> None:
        for slot in filter(None, slots):
            held = self.record(slot)
            if held.holder is Holder.NOBODY:
                self._report(Reason.DOUBLE_FREE, slot, by)
            else:
                held.holder, held.owner, held.freed, held.content = Holder.NOBODY, None, by, None
                self._note_owner(slot)

    def cleared(self) -> None:
        self._set_all(Holder.NOBODY)

    def copied(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        by: Actor,
        contents: Sequence[int] = (),
    ) -> None:
        """`contents`: fingerprints of the sources then, of all bytes. Empty: not taken."""
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            held, copy = self.record(source), self.record(target)
            if held.holder is Holder.UNKNOWN:  # so is what the copy has absorbed
                self._set(target, StateRecord(Holder.UNKNOWN, writer=held.writer))
                continue
            if held.holder is Holder.NOBODY:
                self._report(Reason.USE_AFTER_FREE, source, by)
            content = contents[i] if contents else self._content_of_copy(held)
            holder, owner = copy.holder, copy.owner
            self._set(
                target, replace(held, holder=holder, owner=owner, content=content, freed=None)
            )

    def _content_of_copy(self, held: StateRecord) -> int | None:
        """Equal bytes in two slots have equal fingerprints only if all bytes are read."""
        return None if self._of_zeros is None else held.content

    # Forwards

    def go_on(
        self,
        slots: Sequence[int],
        owners: Sequence[object],
        befores: np.ndarray,
        lengths: np.ndarray | int = 1,
    ) -> list[int]:
        """`used` for decodes of `lengths` tokens, as far as nothing is wrong. `befores`, `lengths`: int64[decodes].

        Returns the indices of the others, for which nothing was done: call `used`.
        """
        at = np.array(slots, dtype=np.int64)
        at[(at < 0) | (at >= self.num_slots)] = 0  # nobody holds slot 0
        ids = np.fromiter(map(id, owners), np.int64, len(owners))
        right = (self._owners[at] == ids) & (self._next[at] == befores)
        gone_on = at[right]
        self._next[gone_on] += lengths if isinstance(lengths, int) else lengths[right]
        self.checks["used"] += len(gone_on)
        return np.flatnonzero(~right).tolist()

    def used(self, slot: int, use: Use, content: int | None = None) -> None:
        """A forward reads the state and overwrites it. `content`: its fingerprint right before, if it was taken."""
        if not self._exists(slot):
            reason = Reason.SLOT_OUT_OF_RANGE if slot else Reason.UNMAPPED_SLOT
            self._report(reason, slot, use.reader, use.before)
            return
        held = self.record(slot)
        if use.owner is None or held.holder is Holder.UNKNOWN:
            self._set(slot, StateRecord(Holder.UNKNOWN, writer=use.reader))
            return
        self.checks["used"] += 1
        if self._is_taken(slot, use):
            return
        if use.before == 0:  # the forward starts from zeros, whatever the slot holds
            held.chain, held.chained = use.anchor, 0
        elif held.position != use.before:
            self._report(Reason.POSITION, slot, use.reader, use.before)
            held.chain = None
        else:
            self._compare(slot, content, use.reader)
        held.holder, held.owner, held.writer = Holder.REQUEST, use.owner, use.reader
        held.absorb(use.tokens, use.before, use.after)
        self._note_owner(slot)

    def used_after_release(self, slot: int, use: Use) -> None:
        """A forward overwrites the state of a request that has ended and given it back, before anyone else needs it."""
        if self._exists(slot) and self.record(slot).holder in (Holder.REQUEST, Holder.CACHE):
            self._is_taken(slot, use)

    def tracked(self, slot: int, source: int, track: Track) -> None:
        """A forward that used `source` has also stored a snapshot of its state. Call it after `used`."""
        if not (self._exists(slot) and self._exists(source)):
            return  # for padding a forward takes no snapshot, and `used` has reported a bad source
        use, held, main = track.use, self.record(slot), self.record(source)
        if use.owner is None or Holder.UNKNOWN in (held.holder, main.holder):
            self._set(slot, StateRecord(Holder.UNKNOWN, writer=use.reader))
            return
        self.checks["tracked"] += 1
        if self._is_taken(slot, use):
            return
        snapshot = StateRecord(Holder.REQUEST, use.owner, track.position, writer=use.reader)
        if main.chained <= track.position:
            snapshot.chain, snapshot.chained = main.chain, main.chained
        self._set(slot, snapshot)

    def _exists(self, slot: int) -> bool:
        """Whether the slot can be a request's."""
        return 0 < slot < self.num_slots

    def _is_taken(self, slot: int, use: Use) -> bool:
        """Whether the slot is not the request's to write. Its record is then that of its holder, and stays."""
        held = self.record(slot)
        if held.holder is Holder.NOBODY:
            self._report(Reason.USE_AFTER_FREE, slot, use.reader, use.before)
        elif held.holder is Holder.CACHE or not (held.owner is None or held.owner is use.owner):
            self._report(Reason.ROW_CHAIN, slot, use.reader, use.before)
        else:
            return False
        return True

    # Prefix cache

    def cached(self, slot: int, prefix: Prefix, content: int | None, by: Actor) -> None:
        """The prefix cache holds the state for `prefix` from now on. `content`: its fingerprint."""
        held, length = self.record(slot), len(prefix.tokens)
        chain: int | None = None
        if held.holder is Holder.NOBODY:
            self._report(Reason.USE_AFTER_FREE, slot, by, length)
        elif held.holder is not Holder.UNKNOWN:
            self.checks["cached"] += 1
            if held.position != length:
                self._report(Reason.POSITION, slot, by, length)
            elif held.chain is not None:
                chain = prefix.chain(stop=held.chained)
                if chain != held.chain:
                    self._report(Reason.CHAIN, slot, by, length, expected_chain=chain)
            if length and content is not None and content == self._of_zeros:
                self._report(Reason.NEVER_WRITTEN, slot, by, length, content_now=content)
            else:  # of a copy that was made for the cache
                self._compare(slot, content, by)
        start = 0 if chain is None else held.chained
        whole = prefix.chain(start, chain)
        self._set(
            slot, StateRecord(Holder.CACHE, None, length, whole, length, content, held.writer)
        )
        if content is not None:
            self._at_rest.add(slot)

    def loaded(
        self, slot: int, target: int, owner: object, prefix: Prefix, content: int | None, by: Actor
    ) -> None:
        """A request takes a copy, in slot `target`, of the state that the prefix cache has for `prefix`.

        `content`: fingerprint of the cached state now. None where its copy is compared when a forward uses it.
        """
        held, length = self.record(slot), len(prefix.tokens)
        chain = prefix.chain()
        if held.holder in (Holder.REQUEST, Holder.CALLER):
            self._report(Reason.ROW_CHAIN, slot, by, length)
        elif held.holder is Holder.CACHE:
            self.checks["loaded"] += 1
            if held.position != length:
                self._report(Reason.POSITION, slot, by, length)
            elif held.chain != chain:
                self._report(Reason.CHAIN, slot, by, length, expected_chain=chain)
            self._compare(slot, content, by)
        content = self._content_of_copy(held)
        self._set(
            target,
            StateRecord(Holder.REQUEST, owner, length, chain, length, content, held.writer),
        )

    def swept(self, slot: int, content: int, by: Actor) -> None:
        """The fingerprint of a state in the prefix cache, or in a slot that has left it since."""
        held = self.record(slot)
        if held.holder is Holder.CACHE:
            self._compare(slot, content, by)
            if content != held.content:
                held.content = None  # said once

    def cached_slot_after(self, slot: int) -> int | None:
        """The next slot in the prefix cache with a fingerprint, starting over at the end. None: there is none."""
        self._at_rest = {s for s in self._at_rest if self._is_at_rest(s)}
        later = [s for s in self._at_rest if s > slot]
        return min(later or self._at_rest, default=None)

    def _is_at_rest(self, slot: int) -> bool:
        held = self._records[slot]
        return held.holder is Holder.CACHE and held.content is not None

    def _compare(self, slot: int, content: int | None, by: Actor) -> None:
        held = self.record(slot)
        if content is None or held.content is None:
            return
        self.checks["compared"] += 1
        if content != held.content:
            self._report(
                Reason.CONTENT,
                slot,
                by,
                held.position,
                content_written=held.content,
                content_now=content,
            )

    def _report(
        self,
        reason: Reason,
        slot: int,
        by: Actor,
        expected_position: int | None = None,
        expected_chain: int | None = None,
        content_written: int | None = None,
        content_now: int | None = None,
    ) -> None:
        held = self.record(slot) if 0 <= slot < self.num_slots else StateRecord(Holder.UNKNOWN)
        self._found(
            StateFinding(
                reason,
                slot,
                held.holder.value,
                by,
                held.writer,
                held.freed,
                expected_position,
                held.position,
                expected_chain,
                None if expected_chain is None else held.chain,
                content_written,
                content_now,
            )
        )
