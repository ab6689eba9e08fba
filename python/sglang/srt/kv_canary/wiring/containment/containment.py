"""SGLANG_KV_CANARY_ACTION=abort: what is done about damage, at the boundary between two steps.

The manager says who has read damage and where it lies. Then its readers end with an error, the damaged prefixes leave
the cache, and memory that changes by itself leaves the allocator.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ...buffer_group import CanaryBufferGroup
from ...pool_kind import PoolKind
from ...record import WORD_WRITER, unpack_writer
from ...reports.safe_text import safe_text
from ...reports.violation import cut_request_id
from ...runner.damage_desk import LOST, Damage, DamageDesk, DamagedSlot, Reader
from ...runner.manager import CanaryManager
from ..forward_stream import on_forward_stream
from ..guard import attempt_aside
from ..releases import release
from .owned_slots import OwnedSlots
from .prefixes import Computed, NoPrefixes, Prefixes
from .terms import Terms
from .verdict import Verdict
from .withheld_slots import WithheldSlots

logger = logging.getLogger(__name__)

RECENT_STEPS = 64  # a finding comes some steps after its forward
# Requests that are remembered as dealt with: more findings about them may come. Those of recent steps are not counted.
MAX_KNOWN = 4096
MAX_NAMED = 16  # requests in one log line

# Damage with which every slot still has one owner, who knows it
_KEEPS_OWNERS = frozenset({"CONTENT", "BAD_STATE", "WRITE_TOKEN", "WRITE_POSITION"})
_NOT_KNOWN = (
    "this request may have read damaged KV cache: more was found at once than "
    "SGLANG_KV_CANARY_RING_CAPACITY keeps"
)
UNJUDGED = (
    "after an internal error, only the readers of damage end, and the whole cache is dropped. Requests that hold what "
    "these have computed go on"
)
_READS = "this request reads KV cache that is damaged or was computed from damage"

__all__ = ["UNJUDGED", "Containment"]


@dataclass(frozen=True, slots=True)
class _Live:
    """A request that holds slots."""

    request: Any
    row: int
    length: int  # slots in the row


@dataclass(frozen=True, slots=True)
class _Gone:
    """A request that gave its row back. With the fields of SGLang's Req by which the cache knows it, and no tensors."""

    step: int
    forward: int  # no later one ran it
    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    extra_key: str | None
    cache_salt: str | None
    has_finished: bool  # False: retracted
    slots: Any  # what `Prefixes.remember` returns


class _Known(NamedTuple):
    """A request that is dealt with."""

    last: int  # the last forward that can be its own: a client may use its id again
    step: int  # in which it was dealt with


@dataclass(slots=True)
class Containment:
    """One per scheduler. Used from its thread, between two steps."""

    scheduler: Any
    manager: CanaryManager
    desk: DamageDesk
    prefixes: Prefixes
    withheld: WithheldSlots
    owned: OwnedSlots
    terms: Terms
    speaks: bool = True  # False: another rank logs what all do
    has_peers: bool = False  # other ranks may end what this one takes for answered
    bell: None = None  # of a single rank; see AgreedContainment
    _misled: set[str] = field(default_factory=set)  # ids of ended requests whose rows may be wrong
    _ending: set[str] = field(default_factory=set)  # ids of ended requests that still have a row
    _known: OrderedDict[str, _Known] = field(default_factory=OrderedDict)  # by id, oldest first
    _recent: deque[_Gone] = field(default_factory=deque)

    @property
    def rows(self) -> torch.Tensor:
        """int32[request rows, context length]: the full slots of each row."""
        return self.manager.plan_input.req_to_token

    def between_steps(self) -> None:
        """The requests of a step have arrived. None of them has looked at the cache yet."""
        if self.desk.is_waiting:
            self.carry_out(self.judge(self.desk.take()))
        self.tidy()

    def judge(self, found: Damage, elsewhere: Iterable[Damage] = ()) -> Verdict:
        """What to do about `found`, and about what other stages have resolved. Changes nothing."""
        verdict = self.opinion(found, elsewhere)
        if not verdict.is_whole and self.speaks:
            logger.error("kv-canary action: %s", UNJUDGED)
        return verdict

    def opinion(self, found: Damage, elsewhere: Iterable[Damage] = ()) -> Verdict:
        """The same, and logs nothing but the error: other ranks may know more.

        After an error, all readers end: the same input would fail again in each step, and they would go on.
        """
        elsewhere = tuple(elsewhere)
        verdict = attempt_aside(self._judge, found, elsewhere)
        return self._unjudged(Damage.of_all((found, *elsewhere))) if verdict is None else verdict

    def _judge(self, found: Damage, elsewhere: tuple[Damage, ...]) -> Verdict:
        return self._verdict(Damage.of_all((self.resolved(found), *elsewhere)))

    def _unjudged(self, damage: Damage) -> Verdict:
        """Who holds what the readers have computed is not known. Nothing is asked of the device or the cache."""
        ends: dict[str, str] = {}
        answered: dict[str, int] = {}
        computed: dict[str, int] = {}
        for reader in damage.readers:
            rid = reader.request_id
            if self._is_known(rid, reader.forward):
                continue
            computed[rid] = 0
            if (end := self._end_of(reader)) is not None:
                answered[rid] = end
            else:
                ends[rid] = _why(reader)
        misled = frozenset(reader.request_id for reader in damage.readers)
        return Verdict(
            ends,
            ends,
            answered,
            bad_memory=damage.bad_memory,
            misled=misled,
            disturbs=True,
            computed=computed,
            is_whole=False,
        )

    def carry_out(self, verdict: Verdict, everything: bool = False) -> bool:
        """End the requests of `verdict`, and drop its slots from the cache, or `everything` that is cached.

        Returns whether that was dropped, and no more.
        """
        live = self._live()
        by_id = {each.request.rid: each.request for each in live}
        self._misled |= verdict.misled & by_id.keys()
        for gone in self._recent:
            if gone.rid in verdict.misled and gone.has_finished:
                attempt_aside(self.prefixes.pin, gone)
        self.owned.disturbed |= verdict.disturbs
        # First, because no later error may let a wrong answer go out
        running, late = self._end_running(verdict, by_id)
        ended = (*running, *self._end_waiting(verdict))
        newest = self.manager.recorder.newest
        answered = {**dict.fromkeys(late, newest), **verdict.answered}
        self._remember({**dict.fromkeys(ended, newest), **answered})
        slots = None if everything or not verdict.is_whole else verdict.slots
        dropped = attempt_aside(self._drop, slots, live, verdict.computed)
        is_as_asked = dropped is not None
        if dropped is None:
            dropped = self.drop_everything(verdict.computed)
        bad = tuple(slot for slot in verdict.bad_memory if self.withheld.withhold(*slot))
        if bad:
            attempt_aside(self._admit_only_what_fits)
        self._tell(ended, tuple(answered), dropped, bad)
        return is_as_asked

    def drop_everything(self, computed: Mapping[str, int]) -> int:
        """Take all out of the cache after an error. `computed`: see `Verdict`. Returns how many tokens were dropped."""
        for starts in (computed, {}):  # an error about these must not keep the rest in the cache
            dropped = attempt_aside(self._drop, None, self._live(), starts)
            if dropped is not None:
                return dropped
        self.desk.forget_slots()
        logger.error(
            "kv-canary action: after internal errors, damage may be left in the prefix cache. What requests have "
            "computed from it is not found again: flush the cache"
        )
        return 0

    def tidy(self) -> None:
        """Free what no request holds any more, and withhold what has been freed."""
        if self.prefixes.num_held or self.desk.quarantined:
            with self._freeing_only_owned():
                self.prefixes.free_unheld()
            self.desk.quarantined = self.prefixes.num_held
        self.withheld.take_from_free_lists()
        self.desk.withheld = self.withheld.counts()

    def before_eviction(self) -> None:
        """A slot that two dropped prefixes have is freed once."""
        if self.owned.disturbed:
            self.tidy()

    def resolved(self, found: Damage) -> Damage:
        """`found`, as it lies in the pool now."""
        slots = self._as_they_are(found.slots)
        return replace(found, slots=slots, tainted=self._computed_from_damage(found.readers))

    def note_finished(self, request: Any) -> None:
        """`request` gives its row back. A finding about it may still come."""
        recorder = self.manager.recorder
        gone = _Gone(
            recorder.step_count,
            recorder.newest,
            request.rid,
            request.origin_input_ids,
            request.output_ids,
            request.extra_key,
            getattr(request, "cache_salt", None),
            self.terms.has_ended(request),
            self.prefixes.remember(request),
        )
        self._recent.append(gone)
        while self._recent[0].step < gone.step - RECENT_STEPS:
            self._recent.popleft()
        if request.rid in self._ending:
            self._ending.discard(request.rid)
            self._remember({request.rid: gone.forward})

    def receiving(self) -> AbstractContextManager[None]:
        """While the requests of a step arrive."""
        return nullcontext()

    def received(self, requests: list[Any]) -> list[Any]:
        """Those that have arrived, without what is for a containment."""
        return requests

    @property
    def may_miss_slots(self) -> bool:
        """A leak is a leak."""
        return False

    def has_wrong_row(self, request: Any) -> bool:
        """Whether the row of `request`, which is about to end, may be wrong."""
        return request.rid in self._misled

    def is_misled(self, request: Any) -> bool:
        """Whether the row of `request`, which is being released, may be wrong."""
        is_misled = self.has_wrong_row(request)
        self._misled.discard(request.rid)
        return is_misled

    def releasing(self, request: Any) -> AbstractContextManager[None]:
        """Around the release of the request's slots."""
        if not self.is_misled(request):
            return nullcontext()
        attempt_aside(self.prefixes.pin, request)
        cached, others = attempt_aside(self._slots_of_others, request) or (None, [])
        return self.owned.freeing_only(cached, others)

    def on_idle(self) -> None:
        """No request holds a slot. Give back what was lost with a wrong row, before SGLang looks for leaks."""
        if self.desk.is_waiting:
            self.between_steps()
        if not self.owned.disturbed:
            return
        if not (self.owned.can_be_restored and self.prefixes.can_be_repaired):
            self.start_afresh()
            return
        lost, surplus = self.owned.restore(self.prefixes.slots(), self.withheld.pages("FULL"))
        if lost or surplus:
            logger.warning(
                "kv-canary action: the free list is repaired. %d slots were missing in it. %d were in it twice, or are "
                "cached",
                lost,
                surplus,
            )

    def start_afresh(self) -> None:
        """On a server without requests: slots that were lost come back."""
        self.scheduler.flush_cache()
        self.owned.disturbed = False
        if self.speaks:
            logger.warning(
                "kv-canary action: the cache is flushed, because slots may have been lost"
            )

    def after_clear(self, allocator: Any) -> None:
        """Its free list is complete again."""
        self.withheld.after_clear(allocator)

    def free_owned(self, slots: torch.Tensor) -> None:
        """Free those of `slots` (FULL) that nobody else has."""
        with self.owned.freeing_only(self.prefixes.slots(), self._held_rows()):
            self.owned.allocator.free(slots)

    def layout(self) -> Iterator[bytes]:
        """Who lies in which slots. Waits for the schedule stream."""
        for each in sorted(self._live(), key=lambda each: each.row):
            yield f"{each.request.rid}:{each.row}:".encode(errors="surrogatepass")
            yield self.rows[each.row, : each.length].cpu().numpy().tobytes()
        yield self.prefixes.slots().cpu().numpy().tobytes()

    # What is done

    def _freeing_only_owned(self) -> AbstractContextManager[None]:
        """Around the release of cached slots."""
        if not self.owned.disturbed:
            return nullcontext()
        cached, others = self.rows.new_empty(0), attempt_aside(self._held_rows)
        return self.owned.freeing_only(None if others is None else cached, others or [])

    def _slots_of_others(self, request: Any) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        return self.prefixes.slots(), self._held_rows(request)

    def _held_rows(self, released: Any = None) -> list[tuple[int, int]]:
        """(row, length) of all requests but `released`."""
        held = [*self._live(), *self._with_rows(self.terms.leaving(self.scheduler))]
        return [(each.row, each.length) for each in held if each.request is not released]

    def _live(self) -> list[_Live]:
        found = {id(r): r for r in self.terms.requests_of(self.scheduler) if r is not None}
        return self._with_rows(request for request in found.values() if not request.finished())

    def _with_rows(self, requests: Iterable[Any]) -> list[_Live]:
        return [
            _Live(request, row, self.terms.length_of(request))
            for request in requests
            if (row := release().row_of(request)) is not None
        ]

    def _end_running(self, verdict: Verdict, by_id: dict[str, Any]) -> tuple[list[str], list[str]]:
        """Ids of those that end now, and of those whose answers have gone out."""
        ended: list[str] = []
        late: list[str] = []
        for rid, why in verdict.running.items():
            request = by_id.get(rid)
            if request is None or rid in self._ending:
                continue
            if self.terms.heeds_aborts and request.to_finish is not None:
                request.skip_radix_cache_insert = True  # it ends without us, and leaves as little
                continue
            in_time = attempt_aside(self.terms.end_running, request, why)
            if in_time is not None:  # an error spares nobody else
                (ended if in_time or self.has_peers else late).append(rid)
        self._ending |= set(ended)
        return ended, late

    def _retracted(self) -> dict[str, Any]:
        """Requests that wait after a retraction, by id."""
        return {r.rid: r for r in self.terms.retracted(self.scheduler) if r.is_retracted}

    def _without_a_row(self) -> Iterator[Any]:
        """Requests that had one."""
        yield from self._retracted().values()
        yield from self._recent

    def _end_waiting(self, verdict: Verdict) -> list[str]:
        waiting = self._retracted()
        ended = [rid for rid in verdict.waiting if rid in waiting]
        for rid in ended:
            self.terms.retracted(self.scheduler).remove(waiting[rid])
            why = verdict.waiting[rid]
            attempt_aside(self.terms.end_waiting, self.scheduler, waiting[rid], why)
        return ended

    def _drop(
        self, slots: frozenset[int] | None, live: list[_Live], starts: Mapping[str, int]
    ) -> int:
        """Take `slots` out of the cache, None for all, and what requests have computed from `starts` on.

        Returns how many tokens were dropped.
        """
        try:
            computed = [
                Computed([*r.origin_input_ids, *r.output_ids], r.extra_key, starts[r.rid])
                for r in self._named(live, starts)
            ]
            with self._freeing_only_owned():
                return self.prefixes.drop(slots, computed)
        finally:
            for each in live:  # a dropped prefix must not be cached under its old key again
                if self.prefixes.holds(each.request):
                    each.request.skip_radix_cache_insert = True
            self.desk.quarantined = self.prefixes.num_held

    def _named(self, live: list[_Live], ids: Container[str]) -> Iterator[Any]:
        """The requests, present or past, with these ids."""
        for request in (*(each.request for each in live), *self._without_a_row()):
            if request.rid in ids:
                yield request

    def _promised_damage(self, live: list[_Live], starts: Mapping[str, int]) -> Iterator[str]:
        """Ids of requests that will get what others have computed from damage, from `starts` on."""
        promised = tuple(self.terms.promised(self.scheduler))
        for source in self._named(live, starts) if promised else ():
            for request, length in promised:
                if _same_tokens(source, request, length) > starts[source.rid]:
                    yield request.rid

    def _admit_only_what_fits(self) -> None:
        """SGLang's bound of a request's length does not know of withheld slots: a longer one would wait forever."""
        scheduler, page = self.scheduler, self.scheduler.page_size
        withheld = len(self.withheld.pages("FULL")) * page
        most = scheduler.max_total_num_tokens - withheld - 2 * page + 1
        margin = scheduler.max_req_len - scheduler.max_req_input_len
        scheduler.max_req_len = min(scheduler.max_req_len, most)
        scheduler.max_req_input_len = min(scheduler.max_req_input_len, most - margin)
        for request in scheduler.waiting_queue:
            scheduler.init_req_max_new_tokens(request)

    def _verdict(self, damage: Damage) -> Verdict:
        """The readers that were found, and all who hold what these have computed, or bytes that have changed."""
        live = self._live()
        by_id = {each.request.rid: each for each in live}
        waiting = self._retracted()
        begin_again = {request.rid for request in self.terms.begin_again(self.scheduler)}
        ends: dict[str, str] = {}
        retracted: dict[str, str] = {}
        answered: dict[str, int] = {}
        computed: dict[str, int] = {}
        tainted = set(damage.tainted)
        for reader in damage.readers:
            found = by_id.get(reader.request_id)
            if self._is_known(reader.request_id, reader.forward):
                continue
            start = 0 if _is_misled(reader) else reader.start
            computed[reader.request_id] = min(start, computed.get(reader.request_id, start))
            if (end := self._end_of(reader)) is not None:
                answered[reader.request_id] = end
            elif found is not None and _has_read(found, reader):
                if self._is_answered(found.request):
                    answered[reader.request_id] = reader.forward
                else:
                    ends[reader.request_id] = _why(reader)
            elif reader.request_id in begin_again:
                continue
            elif reader.request_id in waiting:
                retracted[reader.request_id] = _why(reader)
            else:
                answered[reader.request_id] = reader.forward
        changed = {slot.slot for slot in damage.slots if slot.changed}
        suspect = self._spread(changed, tainted, live, ends, computed)
        for rid in self._promised_damage(live, computed):
            ends.setdefault(rid, _READS)
        for each in live:
            if each.request.rid in ends and self._is_answered(each.request):
                del ends[each.request.rid]
                if not self._is_known(each.request.rid, self.manager.recorder.newest):
                    answered[each.request.rid] = self.manager.recorder.newest
        for reader in filter(_is_misled, damage.readers):  # the cache may have taken the wrong row
            found = by_id.get(reader.request_id)
            holder = self._gone(reader) if found is None else found.request
            if holder is not None:
                suspect.update(self.prefixes.slots_of(holder, 0))
        # Equal tokens may have been computed before, in slots that have left the cache since.
        first = min((reader.forward for reader in damage.readers), default=0)
        for gone in self._recent if tainted else ():
            if not gone.has_finished or gone.rid in answered or gone.forward < first:
                continue
            known = self._is_known(gone.rid, gone.forward)
            # A part of its slots may be others' by now
            if (
                not known
                and tainted.intersection(self.prefixes.slots_of(gone, 0))
                and any(
                    _same_tokens(source, gone) > computed[source.rid]
                    for source in self._named(live, computed)
                )
            ):
                answered[gone.rid] = gone.forward
                computed[gone.rid] = min(computed.values(), default=0)
        misled = frozenset(r.request_id for r in damage.readers if _is_misled(r))
        return Verdict(
            ends,
            retracted,
            answered,
            frozenset(tainted | suspect | {slot.slot for slot in damage.slots}),
            damage.bad_memory,
            misled,
            bool(misled) or any(not slot.changed for slot in damage.slots),
            computed,
        )

    def _spread(
        self,
        changed: set[int],
        tainted: set[int],
        live: list[_Live],
        ends: dict[str, str],
        computed: dict[str, int],
    ) -> set[int]:
        """Add requests that hold slots of `changed` or `tainted`. Returns the slots behind `changed` ones.

        What a request holds behind a tainted slot is tainted. Behind a changed one it may be older than the change.
        """
        if isinstance(self.prefixes, NoPrefixes):
            return set()  # requests share nothing
        suspect: set[int] = set()
        rows = {each.request.rid: self._slots(each, 0) for each in live}
        found = bool(changed or tainted)
        while found:
            found, wrong = False, changed | tainted
            for rid in [rid for rid in rows if rid not in ends]:
                at = [i for i, slot in enumerate(rows[rid]) if slot in wrong]
                if not at:
                    continue
                is_tainted = any(rows[rid][i] in tainted for i in at)
                (tainted if is_tainted else suspect).update(rows[rid][at[0] + 1 :])
                ends[rid] = _READS
                computed[rid] = min(at[0], computed.get(rid, at[0]))
                found = True
        return suspect

    def _slots(self, live: _Live, start: int) -> list[int]:
        """Full slots of the request's row from position `start` on. Waits for the schedule stream."""
        return self._in_pool(self.rows[live.row, start : live.length].tolist())

    def _in_pool(self, slots: list[int]) -> list[int]:
        """Those of `slots` that can be looked up. A wrong row may hold any number, and the cache may have taken it."""
        end = self._full.num_slots
        return [slot for slot in slots if 0 < slot < end]

    @property
    def _full(self) -> CanaryBufferGroup:
        return next(group for group in self.manager.groups if group.kind is PoolKind.FULL)

    def _gone(self, reader: Reader) -> _Gone | None:
        """The request of `reader`, if it gave its row back."""
        for gone in self._recent:
            if gone.rid == reader.request_id and gone.forward >= reader.forward:
                return gone
        return None

    def _cached_slots_of(self, gone: _Gone, start: int) -> list[int]:
        """All slots that may have what `gone` computed from position `start` on."""
        if self.prefixes.loads_copies:
            return self._in_pool(self.prefixes.slots().tolist())
        return self._in_pool(self.prefixes.slots_of(gone, start))

    def _is_answered(self, request: Any) -> bool:
        """Not if it has been ended in time, and keeps its slots until its transfer has failed."""
        return request.rid not in self._ending and self.terms.is_answered(request)

    def _is_known(self, rid: str, forward: int) -> bool:
        """Whether the request that had this id in `forward` is dealt with."""
        known = self._known.get(rid)
        return known is not None and forward <= known.last

    def _end_of(self, reader: Reader) -> int | None:
        """The last forward of a reader that has finished. Who has its id now is another request."""
        return next(
            (
                gone.forward
                for gone in self._recent
                if gone.has_finished
                and gone.rid == reader.request_id
                and gone.forward >= reader.forward
            ),
            None,
        )

    def _computed_from_damage(self, readers: Iterable[Reader]) -> tuple[int, ...]:
        """Full slots that the readers have written since they read damage, in their rows and in the cache."""
        live = {each.request.rid: each for each in self._live()}
        tainted: list[int] = []
        for reader in readers:
            if self._is_known(reader.request_id, reader.forward):
                continue
            has_finished = self._end_of(reader) is not None
            found = None if has_finished else live.get(reader.request_id)
            last = self.manager.recorder.newest
            if found is not None and found.row == reader.row:
                slots = self._slots(found, reader.start)
            elif (gone := self._gone(reader)) is not None:
                last = gone.forward
                slots = self._cached_slots_of(gone, reader.start)
            else:
                continue
            # A duplicate of the cache has taken the place of some: these are right.
            writers = map(unpack_writer, self._writers_of(slots))
            for slot, (low, row, _, _) in zip(slots, writers, strict=True):
                forward = self.manager.recorder.whole_number(low)
                if row == reader.row and reader.forward <= forward <= last:
                    tainted.append(slot)
        return tuple(tainted)

    def _as_they_are(self, slots: tuple[DamagedSlot, ...]) -> tuple[DamagedSlot, ...]:
        """Nobody reads damage in a slot that was rewritten since."""
        words = self._writers_of([slot.slot for slot in slots])
        return tuple(
            replace(slot, changed=slot.changed and word == slot.writer)
            for slot, word in zip(slots, words, strict=True)
        )

    def _writers_of(self, slots: list[int]) -> list[int]:
        """Writer words of full slots. Waits for the forwards in flight: damage is no hot path."""
        if not slots:
            return []
        group = self._full
        with on_forward_stream(self.scheduler, self.manager):
            where = torch.tensor(slots, device=group.k_tail.device)
            return group.k_tail[where, WORD_WRITER].tolist()

    def _remember(self, last_forwards: dict[str, int]) -> None:
        step = self.manager.recorder.step_count
        for rid, forward in last_forwards.items():
            self._known[rid] = _Known(forward, step)
            self._known.move_to_end(rid)
        first = self._first_recent_step(step)
        while len(self._known) > MAX_KNOWN and next(iter(self._known.values())).step < first:
            self._known.popitem(last=False)

    def _first_recent_step(self, step: int) -> int:
        """Findings of forwards from there on may still come, or be compared with requests that have gone."""
        first = step - RECENT_STEPS
        return min(first, self._recent[0].step) if self._recent else first

    # What is said

    def _tell(
        self,
        ended: tuple[str, ...],
        answered: tuple[str, ...],
        dropped: int,
        bad: tuple[tuple[str, int], ...],
    ) -> None:
        if not (ended or answered or dropped or bad):
            return
        self.desk.outcomes["aborted"] += len(ended)
        self.desk.outcomes["answered"] += len(answered)
        self.manager.sink.emit(
            {
                "event": "containment",
                "aborted": [cut_request_id(rid) for rid in ended],
                "answered": [cut_request_id(rid) for rid in answered],
                "dropped": dropped,
                "withheld": [{"pool": kind, "slot": slot} for kind, slot in bad],
            }
        )
        if not self.speaks:
            return
        logger.error(
            "kv-canary action: ended %s; already answered: %s; %d cached tokens dropped",
            _named(ended),
            _named(answered),
            dropped,
        )
        for kind, slot in bad:
            logger.error(
                "kv-canary action: %s slot %d has changed by itself twice. It is never handed out again, because its "
                "memory may be bad. See docs/alarms.md#hardware-or-software",
                kind,
                slot,
            )


def _has_read(live: _Live, reader: Reader) -> bool:
    """Whether the live request is the reader. In another row only if it was retracted since."""
    return live.row == reader.row or live.request.retraction_count > 0


def _is_misled(reader: Reader) -> bool:
    """Whether the request's row, or the allocator's free list, may be wrong."""
    return not _KEEPS_OWNERS.issuperset(reader.reasons)


def _same_tokens(one: Any, other: Any, length: int | None = None) -> int:
    """How many tokens both begin with, in one namespace. `length`: of `other`, in its prompt; None: all that it has."""
    if _namespace(one) != _namespace(other):
        return 0
    given = other.origin_input_ids[:length]
    if length is None:
        given = [*given, *other.output_ids]
    pairs = zip([*one.origin_input_ids, *one.output_ids], given, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _namespace(request: Any) -> tuple[str | None, str | None]:
    return request.extra_key, getattr(request, "cache_salt", None)


def _why(reader: Reader) -> str:
    if reader.reasons == (LOST,):
        return _NOT_KNOWN
    return f"this request has read damaged KV cache ({' + '.join(reader.reasons)})"


def _named(ids: tuple[str, ...]) -> str:
    if not ids:
        return "no request"
    names = ", ".join(f'"{safe_text(rid)}"' for rid in ids[:MAX_NAMED])
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    return f"{names}{more}"
