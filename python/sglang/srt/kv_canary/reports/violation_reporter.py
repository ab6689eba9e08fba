"""What happens to a finding: its cause is named in the log and in events, or ends the server."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..config import CanaryMode
from ..errors import CanaryViolationError
from ..record import MIX_INCREMENT, Column, mix64
from .cause import MAX_EVENTS, Cause, CauseKey, CopyKey
from .event_sink import EventSink
from .evidence import Evidence, History
from .flight_recorder import FlightRecorder
from .internal_errors import describe_error
from .known_findings import KnownFindings, KnownReaders, KnownSlots, Repeats, finding_keys
from .losses import DROPPED, OVERWRITTEN, Losses
from .neighbours import Halves, Neighbours, put_bounded
from .scene import Taker
from .scenes import Scenes
from .slot_history import SlotHistory
from .state_finding import StateFinding
from .story import Story
from .tier_finding import Finding
from .violation import Violation, decode_row

logger = logging.getLogger(__name__)

MAX_NAMED = 20  # causes named per interval; the others wait their turn
MAX_LOOKUPS = (
    16  # in the history per interval; each takes about 1 ms, and the first of a step 5 ms more
)
MOST_TAKEN = 256  # rows of a step, while damage that stays brings nothing new
MAX_WAITING = 4096  # waiting causes and findings; further findings are dropped and counted
# Findings outside the device pool may take one in so many of what is named, and read, beside those of the device pool.
# So many fewer may wait. A flood of either kind hides nothing of the other.
PART_OUTSIDE = 4
# New findings read per step: each takes about 0.1 ms of the scheduler's thread.
READ_PER_STEP = 16
READ_PER_IDLE_TICK = 512
MAX_CAUSES = 4096  # causes kept for folding; a forgotten cause gets a new number
IDLE_INTERVAL_S = 1.0  # an idle server names waiting causes, however long the interval is
LAST_WORDS_ENV = "_KV_CANARY_LAST_WORDS_FILE"  # set by the main process for its children


@dataclass(slots=True)
class _Unread:
    """A new finding whose cause is not yet known."""

    row: np.ndarray
    recorder: FlightRecorder
    is_in_part: bool  # other findings of its step were only counted
    repeats: int = 0


Found = tuple[Finding | StateFinding, int]  # outside the device pool, and the last forward launched


@dataclass(slots=True)
class _UnreadOutside:
    """A new finding outside the device pool, or all of one half of a stored page."""

    first: Found
    last: Found
    recorder: FlightRecorder
    findings: int = 1

    def violations(self) -> list[Violation]:
        """One for each finding. All but the last one of a page are shown as the first one: a page has many slots."""
        finding, forward = self.first
        shown = [finding.as_violation(self.recorder, forward)]
        if self.findings == 1:
            return shown
        finding, forward = self.last
        return shown * (self.findings - 1) + [finding.as_violation(self.recorder, forward)]


class ViolationReporter:
    """Folds findings into causes and names each cause once. Repeats are counted.

    An interval begins with the first cause that is named after the previous interval. Events are written as soon as a
    finding has been read. The log may have to wait.
    """

    def __init__(
        self,
        mode: CanaryMode,
        sink: EventSink,
        log_every_s: float,
        numbers: Iterator[int] | None = None,  # shared by the runners of a process
        halves: Halves | None = None,  # that each pool kind has; None: unknown
        history: SlotHistory | None = None,  # of the allocators; None: not kept
        taker: Taker | None = None,  # of scenes; None: none are taken
    ) -> None:
        self._mode = mode
        self._sink = sink
        self._log_every_s = log_every_s
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._history = history
        self._scenes = Scenes(taker)
        self._lookups = 0  # in the history, in this interval
        self._known = KnownFindings()
        self._damaged = KnownSlots()
        self._readers = KnownReaders()
        self._losses = Losses(sink)
        self._causes: dict[CauseKey, Cause] = {}
        self._copies: dict[CopyKey, Cause] = {}  # that went wrong
        self._joined: dict[CauseKey, Cause] = {}  # findings in further slots of these
        self._neighbours = Neighbours({} if halves is None else halves)
        self._unread: dict[int, _Unread] = {}  # new findings, oldest first
        self._waiting: deque[Cause] = deque()  # to be named, oldest first
        # The same outside the device pool
        self._unread_outside: dict[Hashable, _UnreadOutside] = {}
        self._waiting_outside: deque[Cause] = deque()
        self._grown: dict[int, Cause] = {}  # due for a summary event
        self._untold: deque[Cause] = deque()  # without a summary event, oldest first
        self._interval_began = float("-inf")
        self._room = 0  # causes that may still be named in this interval
        self._said_wait = False
        self._only_repeats = False  # nothing in the last rows was new
        self._turn = 0  # of parts of floods
        # Findings since the last log lines about them, by how many causes may wait
        self._dropped: Counter[int] = Counter()
        self.lost_until = -1  # of findings of forwards up to this one some were overwritten unread
        self.distinct = 0  # findings
        self.repeats = 0
        self.causes = 0

    # What is found

    def log_or_raise_violation(self, rows: np.ndarray, recorder: FlightRecorder) -> None:
        """Take new findings from `rows` of the ring, for `name_waiting`. RAISE mode raises CanaryViolationError."""
        self._take(rows, recorder)
        if self._mode is CanaryMode.RAISE and (causes := self._read(len(self._unread))):
            self._raise(causes)

    def take_found(self, findings: Sequence[Found], recorder: FlightRecorder) -> None:
        """Take new findings outside the device pool, for `name_waiting`. RAISE mode raises CanaryViolationError."""
        dropped = []
        most = MAX_WAITING // PART_OUTSIDE
        for found in findings:
            finding, forward = found
            key = finding.page_half
            unread = self._unread_outside.get(key)
            if unread is not None:
                unread.last = found
                unread.findings += 1
            elif len(self._waiting_outside) + len(self._unread_outside) >= most:
                dropped.append(finding.forward_of(forward))
            else:
                key = object() if key is None else key
                self._unread_outside[key] = _UnreadOutside(found, found, recorder)
        if dropped:
            self._note_dropped(dropped, most)
        if self._mode is CanaryMode.RAISE:
            self._read_outside(len(self._unread_outside))

    def log_or_raise_found(self, violations: Sequence[Violation], recorder: FlightRecorder) -> None:
        """Fold findings that are no rows of the ring. RAISE mode raises CanaryViolationError.

        A violation that comes several times in a row stands for as many slots.
        """
        causes: dict[int, Cause] = {}
        for _, same in itertools.groupby(violations, key=id):
            violation, *others = same
            cause = self._fold(violation, recorder)
            cause.findings += len(others)
            self.distinct += len(others)
            causes[cause.number] = cause
        if self._mode is CanaryMode.RAISE and causes:
            self._raise(list(causes.values()))

    def _take(self, rows: np.ndarray, recorder: FlightRecorder) -> None:
        """Count repeats, and keep new findings for `_read`."""
        count = len(rows)
        rows = self._part_of_flood(rows, recorder)
        is_in_part = len(rows) < count
        keys = finding_keys(rows, recorder)
        repeats, new = self._known.split(keys)
        self._only_repeats = not new
        dropped = []
        for repeat in repeats:
            self._count_repeats(repeat, int(rows[repeat.last_row, Column.READER_FORWARD]))
        for index in new:
            key = int(keys[index])
            if key in self._unread:
                self.repeats += 1
                self._unread[key].repeats += 1
            elif len(self._waiting) + len(self._unread) >= MAX_WAITING:
                dropped.append(index)
            else:
                self._unread[key] = _Unread(rows[index], recorder, is_in_part)
        if dropped:
            self._note_dropped(rows[dropped, Column.READER_FORWARD].tolist(), MAX_WAITING)

    def _note_dropped(self, forwards: list[int], most: int) -> None:
        """`forwards`: those of the findings that are dropped, because `most` wait."""
        self._dropped[most] += len(forwards)
        self._losses.note(DROPPED, len(forwards), min(forwards), max(forwards))

    def note_gap(self, last: int) -> None:
        """Findings of forwards up to `last` were overwritten unread."""
        self.lost_until = max(self.lost_until, last)

    def note_lost(self, findings: int, first: int, last: int) -> None:
        """So many of them, of forwards `first` to `last`, are known to be lost: their readers were alive."""
        self._losses.note(OVERWRITTEN, findings, first, last)

    def _part_of_flood(self, rows: np.ndarray, recorder: FlightRecorder) -> np.ndarray:
        """All of `rows`, or fewer while damage that stays is found in each step, and nothing new.

        Those about slots that no finding was about are always among them, and those of new readers: a step may be the
        only one of a request. Of the others it is every k-th, about MOST_TAKEN, from a place without a pattern. What is
        left out counts as repeats of no cause.
        """
        parts = -(-len(rows) // MOST_TAKEN)
        if parts <= 1 or not self._only_repeats:
            return rows
        self._turn += 1
        taken = self._damaged.lacks(rows) | self._readers.new_in(rows, recorder)
        taken[mix64(self._turn * MIX_INCREMENT) % parts :: parts] = True
        rows_taken = rows[taken]
        self.repeats += len(rows) - len(rows_taken)
        return rows_taken

    def _count_repeats(self, repeats: Repeats, forward: int) -> None:
        cause = repeats.cause
        self.repeats += repeats.count
        cause.findings += repeats.count
        cause.last_forward = max(cause.last_forward, forward)
        if cause.has_doubled:
            self._note_grown(cause)

    def _note_grown(self, cause: Cause) -> None:
        put_bounded(self._grown, cause.number, cause, MAX_CAUSES)

    def _read_new(self, limit: int) -> None:
        """Read the oldest new findings of both kinds."""
        outside = _part_outside(limit, len(self._unread_outside), len(self._unread))
        self._read_outside(outside)
        self._read(limit - outside)

    def _read_outside(self, limit: int) -> None:
        """Fold the oldest new findings outside the device pool. RAISE mode raises CanaryViolationError."""
        violations: list[Violation] = []
        for key in list(itertools.islice(self._unread_outside, limit)):
            unread = self._unread_outside.pop(key)
            violations += unread.violations()
        if violations:
            self.log_or_raise_found(violations, unread.recorder)

    def _read(self, limit: int) -> list[Cause]:
        """Fold the oldest new findings into causes, and return those causes."""
        touched: dict[int, Cause] = {}
        for key in list(itertools.islice(self._unread, limit)):
            unread = self._unread.pop(key)
            violation = decode_row(unread.row, unread.recorder)
            cause = self._fold(violation, unread.recorder, unread.is_in_part)
            cause.findings += unread.repeats
            self._known.add(key, cause)
            self._damaged.note(unread.row)
            touched[cause.number] = cause
        return list(touched.values())

    def _fold(
        self, violation: Violation, recorder: FlightRecorder, is_in_part: bool = False
    ) -> Cause:
        self.distinct += 1
        key = CauseKey.of(violation)
        cause = self._causes.get(key) or self._of_copy(key, violation, recorder)
        if cause is None:
            cause = self._new_cause(key, violation, recorder)
            cause.is_in_part = is_in_part
        cause.fold(violation)
        if cause.events < MAX_EVENTS:
            cause.note_found_told()
            self._sink.emit(replace(violation, cause=cause.number).as_event())
        elif cause.has_doubled or cause.has_untold_reader:
            self._note_grown(cause)
        return cause

    def _of_copy(
        self, key: CauseKey, violation: Violation, recorder: FlightRecorder
    ) -> Cause | None:
        """The cause of the same copy of several slots, in whichever of them it was found first."""
        if key in self._joined:
            return self._joined[key]
        copy = CopyKey.of(violation, recorder)
        cause = None if copy is None else self._copies.get(copy)
        if cause is not None:
            put_bounded(self._joined, key, cause, MAX_CAUSES)
            if violation.tier is None:
                self._neighbours.join(cause, violation)
        return cause

    def _new_cause(self, key: CauseKey, violation: Violation, recorder: FlightRecorder) -> Cause:
        number = next(self._numbers)
        history = History.of(violation, recorder, self.lost_until)
        cause = Cause(number, replace(violation, cause=number), history)
        if self._history is not None:
            self._history.catch_up()
        cause.pending_scene = self._scenes.take(violation, recorder)
        if violation.tier is None:  # other tiers have slot numbers of their own
            self._neighbours.note(cause)
        self._untold.append(cause)
        put_bounded(self._causes, key, cause, MAX_CAUSES)
        if (copy := CopyKey.of(violation, recorder)) is not None:
            put_bounded(self._copies, copy, cause, MAX_CAUSES)
        self.causes += 1
        if self._mode is not CanaryMode.RAISE:
            waiting = self._waiting if violation.tier is None else self._waiting_outside
            waiting.append(cause)
        return cause

    def _raise(self, causes: list[Cause]) -> None:
        self._await_scenes()
        self._tell(len(self._untold))
        self._losses.write(at_once=True)
        text = "\n".join(self._report(cause) for cause in causes[:4])
        if len(causes) > 4:
            text += (
                f"\nkv-canary: and {len(causes) - 4} more causes in the same step{self._where()}"
            )
        leave_last_words(text)
        raise CanaryViolationError(text)

    def renew_scenes(self) -> None:
        """The next causes get scenes as the first ones of a process do: a staged fault begins."""
        self._scenes.renew()

    def forget_scenes(self, until: int) -> None:
        """The memory around findings of forwards up to `until` is given back now. Waits for scenes on their way."""
        self._await_scenes()
        self._scenes.forget(until)

    def causes_about(
        self, is_about: Callable[[Cause], bool | None], limit: int
    ) -> tuple[list[tuple[Cause, str]], bool]:
        """(the newest `limit` causes that `is_about` accepts, oldest first, with sentences; whether there may be more).

        `is_about` says None of a cause that does not know.
        """
        known = [(cause, is_about(cause)) for cause in self._causes.values()]
        found = [cause for cause, accepted in known if accepted]
        forgotten = self.causes > len(self._causes) or any(
            accepted is None for _, accepted in known
        )
        told = [(cause, self._story_of(cause).sentence) for cause in found[-limit:]]
        return told, forgotten or len(found) > limit

    # What is said

    @property
    def has_work(self) -> bool:
        """Whether causes wait to be named, or something else to be said."""
        unread = self._unread or self._unread_outside
        waits = self._waiting or self._waiting_outside or self._untold or self._grown
        return bool(unread or waits or self._dropped or self._losses.has_work)

    def name_waiting(self, idle: bool = False) -> None:
        """Name the causes whose turn it is. Called after each step, and while the server idles."""
        if not self.has_work:
            return
        limit = READ_PER_IDLE_TICK if idle else READ_PER_STEP
        self._read_new(limit)
        if idle:
            self._await_scenes()
        self._tell(limit)
        self._losses.write()
        now = time.monotonic()
        interval = min(self._log_every_s, IDLE_INTERVAL_S) if idle else self._log_every_s
        if now - self._interval_began >= interval:
            self._interval_began, self._room, self._said_wait = now, MAX_NAMED, False
            self._lookups = 0
            self._sum_up(MAX_NAMED)
            self._say_dropped()
        waiting = len(self._waiting), len(self._waiting_outside)
        self._name(self._waiting_outside, _part_outside(self._room, waiting[1], waiting[0]))
        self._name(self._waiting, self._room)
        self._say_wait()

    def _name(self, waiting: deque[Cause], limit: int) -> None:
        while waiting and limit and self._has_scene(waiting[0]):
            limit -= 1
            self._room -= 1
            logger.error("%s", self._report(waiting[0]))
            waiting.popleft()  # only now: after an interruption it is named twice rather than never

    def _say_wait(self) -> None:
        waiting = len(self._waiting) + len(self._waiting_outside)
        if waiting and not (self._room or self._said_wait):
            self._said_wait = True
            logger.error(
                "kv-canary: %d more causes wait to be named, at most %d at a time%s",
                waiting,
                MAX_NAMED,
                self._where(),
            )

    def name_all(self) -> None:
        """The process ends. Name every waiting cause; those beyond MAX_NAMED get one line each."""
        self._read_outside(len(self._unread_outside))
        self._read(len(self._unread))
        self._await_scenes()
        self._tell(len(self._untold))
        waiting = [*self._waiting, *self._waiting_outside]
        for cause in waiting[:MAX_NAMED]:
            logger.error("%s", self._report(cause))
        rest = [cause.line() for cause in waiting[MAX_NAMED:]]
        if rest:
            logger.error(
                "kv-canary: %d more causes%s:\n%s", len(rest), self._where(), "\n".join(rest)
            )
        self._waiting.clear()
        self._waiting_outside.clear()
        self._grown |= {c.number: c for c in self._causes.values() if c.findings > c.reported}
        self._sum_up(len(self._grown))
        self._losses.write(at_once=True)
        self._say_dropped()

    def _report(self, cause: Cause) -> str:
        return cause.report(self._story_of(cause))

    def _story_of(self, cause: Cause) -> Story:
        """Never raises: a report without a story is better than no report."""
        try:
            self._look_up_moments(cause)
            return Story.of(self._evidence_of(cause))
        except Exception as error:
            logger.error(
                "kv-canary cannot explain cause #%d: %s", cause.number, describe_error(error)
            )
            return Story()

    def _look_up_moments(self, cause: Cause) -> None:
        """What the allocators did with the slot, as of the first look."""
        place = cause.place
        if cause.moments is not None or self._history is None or place is None:
            return
        # What continues the damage of a cause has the guess of that one. Others need a lookup of their own.
        most = MAX_LOOKUPS if cause.run is None else (MAX_LOOKUPS + 1) // 2
        if self._lookups < most:
            self._lookups += 1
            cause.moments = self._history.of(*place)
            self._look_up_full(cause)

    def _look_up_full(self, cause: Cause) -> None:
        """The same of the full slot of an evicted SWA slot."""
        place = cause.full_place
        if place is None or self._history is None:
            return
        cause.full_moments = cause.moments
        if place != cause.place:
            self._lookups += 1
            cause.full_moments = self._history.of(*place)

    def _evidence_of(self, cause: Cause) -> Evidence:
        # Outside the device pool the halves of a page are found one after the other.
        is_of_device = cause.first.tier is None
        is_whole = not cause.is_in_part and cause.first.reader.forward > self.lost_until
        is_complete = is_of_device and is_whole and self._is_complete(cause)
        return self._neighbours.evidence_of(cause, is_complete)

    def _is_complete(self, cause: Cause) -> bool:
        """Whether every finding of the forward that first found `cause` has been read."""
        if not self._unread:
            return True
        oldest = next(iter(self._unread.values()))
        return int(oldest.row[Column.READER_FORWARD]) > cause.first.reader.forward

    def _is_ready(self, cause: Cause) -> bool:
        return self._is_complete(cause) and self._has_scene(cause)

    def _has_scene(self, cause: Cause, wait: bool = False) -> bool:
        """Whether the scene of `cause` has arrived, if there is one."""
        if cause.pending_scene is None:
            return True
        cause.scene = self._scenes.result(cause.pending_scene, wait)
        if cause.scene is None:
            return False
        cause.pending_scene = None
        return True

    def _await_scenes(self) -> None:
        """Wait for the device: the server idles, or ends."""
        for cause in self._untold:
            self._has_scene(cause, wait=True)

    def _tell(self, limit: int) -> None:
        """Write the first event about new causes, as soon as all endpoints of the forward have been read."""
        while self._untold and limit and self._is_ready(self._untold[0]):
            limit -= 1
            self._write_summary(self._untold.popleft())

    def _write_summary(self, cause: Cause) -> None:
        self._grown.pop(cause.number, None)
        cause.note_told()
        summary = cause.summary(self._story_of(cause))
        self._sink.emit(summary)
        if cause.scene is not None and not cause.has_snapshot:
            cause.has_snapshot = True
            self._sink.write_snapshot(cause.number, cause.snapshot(summary))

    def _sum_up(self, limit: int) -> None:
        """Write events about causes that have grown since their last event."""
        for cause in list(itertools.islice(self._grown.values(), limit)):
            self._write_summary(cause)

    def _say_dropped(self) -> None:
        for most, findings in self._dropped.items():
            logger.error(
                "kv-canary: %d findings were dropped while %d causes waited to be named. They are neither in this log "
                "nor in an event file",
                findings,
                most,
            )
        self._dropped.clear()

    def _where(self) -> str:
        return " (all are in the event file)" if self._sink.is_complete else ""


def _part_outside(limit: int, outside: int, device: int) -> int:
    """How many of `limit` are of those outside the device pool, if so many of both kinds wait."""
    return min(outside, max(limit // PART_OUTSIDE, limit - device))


def leave_last_words(text: str) -> None:
    """Leave `text` where the main process looks before it kills the process tree."""
    path = os.environ.get(LAST_WORDS_ENV)
    if path:
        # Without this text the main process says less; the error that follows is the same.
        with suppress(OSError), Path(path).open("a") as file:
            file.write(text + "\n")
