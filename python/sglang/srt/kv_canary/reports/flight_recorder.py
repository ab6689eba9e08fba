"""Remembers the requests of each forward, so that a violation can name them, and which of them were dead.

A forward is in flight from its launch until the scheduler processes its result. If a request's row is given back in
that time, the request is dead in that forward. What the forward saw of it is moot: findings are dropped as stale.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ..pool_kind import PoolKind
from ..record import forwards_between
from .origin import Origin
from .weight_history import WeightHistory

MAX_FORWARDS = 8192  # forwards that reports can still look up
LOOK_BACK = 64  # forwards in which a request's previous forward is looked for
RELEASE_STEPS = 1024  # for which releases of a row, and first positions, are remembered. A finding is read within 256
NEAR = 64  # places of a step's names that are looked at first
MAX_BY_ROW = 2 * LOOK_BACK  # dicts of 150 KB with 4,096 requests
SEARCHED_ROWS = 1 << 18  # between two pauses of a search, 6 ms


# Row of a request, and its id, as they were at a launch. None: it has no row.
RequestName = tuple[int | None, str]
Names = dict[int, str] | tuple[RequestName, ...]


def _is_unknown() -> bool:
    return False


class _RequestsByRow:
    """Dicts of the tuples that were asked about last. Steps with the same tuple share one."""

    def __init__(self) -> None:
        # By id of the tuple, which is kept alive. Last used at the end
        self._kept: dict[int, tuple[tuple[RequestName, ...], dict[int, str]]] = {}

    def of(self, named: tuple[RequestName, ...]) -> dict[int, str]:
        kept = self._kept.pop(id(named), None)
        if kept is None:
            by_row = dict(named)
            by_row.pop(None, None)
            kept = named, by_row
            if len(self._kept) >= MAX_BY_ROW:
                self._kept.pop(next(iter(self._kept)))
        self._kept[id(named)] = kept
        return kept[1]


_BY_ROW = _RequestsByRow()  # no part of a step: a dict in each of 8,192 steps takes 1.2 GB


@dataclass(slots=True)
class StepRecord:
    """One scheduler step. What only findings ask for is worked out when one does: there is no time in each step."""

    step: int
    named: Names  # row -> request id, in batch order
    released: set[int] = field(
        default_factory=set
    )  # given back while it was in flight, of any request
    rewritten: set[int] = field(default_factory=set)  # re-pointed in that time, of any request
    in_flight: bool = True
    # Without a result it is over as soon as a later step's arrives, or the device has completed its forwards.
    has_result: bool = True
    is_complete: Callable[[], bool] = _is_unknown  # asked of a step without a result
    origins: Mapping[int, Origin] = field(default_factory=dict)  # row -> where its KV came from
    # First position that the step computes, of each in `named`. Empty unless an action asks for it, and after
    # RELEASE_STEPS
    starts: Sequence[int] = ()

    @property
    def requests(self) -> dict[int, str]:
        """Request id of each row, in batch order."""
        return _BY_ROW.of(self.named) if type(self.named) is tuple else self.named

    @property
    def moot_rows(self) -> set[int]:
        """Rows of its requests that were given back while it was in flight."""
        return self.released & self.requests.keys() if self.released else self.released

    @property
    def rewritten_rows(self) -> set[int]:
        """Rows of its requests that were re-pointed while it was in flight."""
        return self.rewritten & self.requests.keys() if self.rewritten else self.rewritten


class ForwardRecord(NamedTuple):
    """A tuple: one is made for each forward."""

    forward: int
    mode: str
    step: StepRecord | None  # None: a forward that no scheduler step asked for


@dataclass(slots=True)
class Steps:
    """The scheduler's steps, shared by all model runners of the process."""

    count: int = 0
    current: StepRecord | None = None
    # row -> steps after which it was given back, oldest first. It begins with 0, which is before the first step
    released: dict[int, deque[int]] = field(default_factory=dict)
    in_flight: deque[StepRecord] = field(
        default_factory=deque
    )  # whose result has not arrived, oldest first
    without_result: int = 0  # of them, those that have none
    with_starts: deque[StepRecord] = field(default_factory=deque)  # oldest first


class FlightRecorder:
    """The last MAX_FORWARDS forwards of one model runner. Used from the scheduler's thread only.

    Each model runner numbers its own forwards, so `for_runner` gives each a recorder.
    """

    def __init__(self, max_forwards: int = MAX_FORWARDS, steps: Steps | None = None) -> None:
        self._forwards: OrderedDict[int, ForwardRecord] = OrderedDict()  # oldest first
        self._newest = 0
        self._max_forwards = max_forwards
        self._steps = Steps() if steps is None else steps
        # The step whose `starts` were asked for last, and them by row
        self._starts: tuple[StepRecord | None, dict[int | None, int]] = (None, {})
        self.weights = WeightHistory()
        self.has_virtual_swa_slots = False  # see CanaryBufferGroup.is_rebound
        self.receives = (
            False  # KV comes from prefill servers, so no forward of its own is a prefill
        )

    def for_runner(self, weight_version: str | None = None) -> FlightRecorder:
        """A recorder without forwards that sees the same steps. `weight_version` names the first weights."""
        recorder = FlightRecorder(self._max_forwards, self._steps)
        recorder.weights = WeightHistory(weight_version)
        return recorder

    @property
    def step_count(self) -> int:
        """Steps that have begun."""
        return self._steps.count

    def begin_step(
        self,
        requests: Mapping[int, str] | Iterable[RequestName],
        origins: Mapping[int, Origin] | None = None,
        starts: Sequence[int] | None = None,
        given_back: Iterable[int] = (),
    ) -> StepRecord:
        """A scheduler step is about to launch its forwards. `requests`: rows and their request ids.

        `origins`: of a step that checks what has arrived, where each row's KV came from. Such a step has no result.
        `starts`: the first position that the step computes, of each of `requests`. They are kept in this form.
        `given_back`: rows of requests that have ended since their batch was prepared. What the step sees of them is
        moot, and nobody has them after it.
        """
        steps = self._steps
        steps.count += 1
        named = requests if type(requests) is tuple else dict(requests)
        steps.current = StepRecord(steps.count, named)
        if origins is not None:
            steps.current.origins, steps.current.has_result = origins, False
            steps.without_result += 1
        if starts is not None:
            steps.current.starts = starts
            steps.with_starts.append(steps.current)
            if len(steps.with_starts) > RELEASE_STEPS:
                steps.with_starts.popleft().starts = ()
        steps.in_flight.append(steps.current)
        for row in given_back:
            self._note_release(row)
            steps.current.released.add(row)
        return steps.current

    def end_step(self) -> None:
        """All forwards of the current step are launched."""
        self._steps.current = None

    def note_forward(self, forward: int, mode: str) -> None:
        """`forward` is launched now. The number of an abandoned forward is reused."""
        named = forward, mode, self._steps.current
        # Its own constructor is a function in Python
        self._forwards[forward] = tuple.__new__(ForwardRecord, named)
        if len(self._forwards) > self._max_forwards:
            self._forwards.popitem(last=False)
        self._newest = forward

    def whole_number(self, low: int) -> int:
        """The newest forward whose number has these low 32 bits. A record keeps no more of the number."""
        return max(low, self._newest - forwards_between(low, self._newest))

    def result_arrived(self, step: StepRecord) -> None:
        """The scheduler begins to process the step's result. From now on nothing in it becomes moot."""
        step.in_flight = False
        waiting = self._steps.in_flight
        if waiting and waiting[0] is step:
            waiting.popleft()
        elif step in waiting:
            waiting.remove(step)
        if self._steps.without_result:
            self.settle_without_result(step.step)

    def settle_without_result(self, before: float = math.inf) -> None:
        """Steps without a result that were launched before step number `before` are over."""
        waiting = self._steps.in_flight
        for step in [s for s in waiting if not s.has_result and s.step < before]:
            step.in_flight = False
            waiting.remove(step)
            self._steps.without_result -= 1

    def _settle_complete(self) -> None:
        """A request that ends with its first token gives its row back right after the check of what has arrived."""
        for step in [s for s in self._steps.in_flight if not s.has_result and s.is_complete()]:
            step.in_flight = False
            self._steps.in_flight.remove(step)
            self._steps.without_result -= 1

    def row_released(self, row: int) -> None:
        """The host gave a request row back. What forwards in flight see of it is moot."""
        self._note_release(row)
        self._settle_complete()
        for step in self._steps.in_flight:
            step.released.add(row)

    def _note_release(self, row: int) -> None:
        """Nobody has the row after the last step that has begun."""
        now = self._steps.count
        steps = self._steps.released.get(row)
        if steps is None:
            steps = self._steps.released[row] = deque((0,))
        if steps[-1] == now:
            return
        steps.append(now)
        # One that is older stays: it was the last one for all steps since
        oldest = now - RELEASE_STEPS
        while steps[1] <= oldest:
            steps.popleft()

    def row_rewritten(self, row: int) -> None:
        """The host re-points a living request's row to equal slots of the prefix cache."""
        self._settle_complete()
        for step in self._steps.in_flight:
            step.rewritten.add(row)

    def forget_in_flight(self) -> None:
        """Some row events went unnoticed. Everything that forwards in flight see is moot."""
        for step in self._steps.in_flight:
            step.released.update(step.requests)

    def find(self, forward: int) -> ForwardRecord | None:
        return self._forwards.get(forward)

    def on_record(self, first: int, last: int) -> list[int]:
        """The forwards on record from number `first` to `last`. Looks through the shorter of both."""
        if last - first < len(self._forwards):
            return [forward for forward in range(first, last + 1) if forward in self._forwards]
        return [forward for forward in self._forwards if first <= forward <= last]

    def step_of(self, forward: int) -> StepRecord | None:
        """The scheduler step that asked for `forward`. None: no step did, or it is not on record."""
        found = self._forwards.get(forward)
        return None if found is None else found.step

    def is_settled(self, forward: int) -> bool:
        """Whether it is known which requests of this forward were dead."""
        found = self._forwards.get(forward)
        return found is None or found.step is None or not found.step.in_flight

    def is_moot(self, forward: int, row: int) -> bool:
        found = self._forwards.get(forward)
        return found is not None and found.step is not None and row in found.step.moot_rows

    def previous_of(self, forward: int, row: int) -> ForwardRecord | None:
        """The last forward before `forward` that ran the same request. None if not among the last LOOK_BACK."""
        return next(self._runs_before(forward, row), None)

    def _runs_before(self, forward: int, row: int) -> Iterator[ForwardRecord]:
        """The forwards that ran the same request in `row` without a pause of LOOK_BACK, newest first.

        A client may use a request id again: then the row was given back in between. There are none if that is no
        longer known.
        """
        request, given = self.request_id(forward, row), self._released_before(forward, row)
        if request is None or given is None:
            return
        last, place = forward, 0
        for earlier in range(forward - 1, 0, -1):
            if last - earlier > LOOK_BACK:
                return
            found = self._forwards.get(earlier)
            if found is None or found.step is None:
                continue
            if found.step.step <= given:
                return
            at = _place_of(found.step.named, row, request, place)
            if at is not None:
                last, place = earlier, at
                yield found

    def was_released(self, row: int, earlier: int, later: int) -> bool | None:
        """Whether the host gave `row` back between two forwards on record. None: no longer known."""
        first, given = self.step_of(earlier), self._released_before(later, row)
        if first is None or self.step_of(later) is None:
            return False
        return None if given is None else first.step <= given

    def _released_before(self, forward: int, row: int) -> int | None:
        """The last step before that of `forward` after which `row` was given back; 0: none. None: no longer known."""
        step = self.step_of(forward)
        if step is None:
            return None
        releases = self._steps.released.get(row, (0,))
        return next((given for given in reversed(releases) if given < step.step), None)

    def other_owner(self, forward: int, row: int) -> tuple[str, int] | None:
        """(request id, forward): who ran in `row` before and has not given it back. In the last LOOK_BACK forwards.

        A row has one request at a time. Rows are handed out again only after they were given back. None if it is no
        longer known whether the row was.
        """
        request, given = self.request_id(forward, row), self._released_before(forward, row)
        if request is None or given is None:
            return None
        for earlier in range(forward - 1, max(0, forward - 1 - LOOK_BACK), -1):
            step = self.step_of(earlier)
            if step is None:
                continue
            if step.step <= given:
                return None
            other = step.requests.get(row)
            if other not in (None, request):
                return other, earlier
        return None

    @property
    def newest(self) -> int:
        """The forward that was launched last."""
        return self._newest

    def owners(self) -> dict[int, str]:
        """The rows that the last LOOK_BACK forwards have run and that were not given back since, and their requests."""
        owners: dict[int, str] = {}
        looked_at: Names | None = None
        for forward in range(self._newest, max(0, self._newest - LOOK_BACK), -1):
            step = self.step_of(forward)
            # What an earlier step has of the same names, a later one has, too
            if step is None or step.named is looked_at:
                continue
            looked_at = step.named
            for row, request in _pairs(looked_at):
                if row is not None and self._released_last(row) < step.step:
                    owners.setdefault(row, request)
        return owners

    def _released_last(self, row: int) -> int:
        """The last step after which `row` was given back; 0: never."""
        steps = self._steps.released.get(row)
        return steps[-1] if steps else 0

    def first_of(self, forward: int, row: int) -> int:
        """The first forward on record that ran the same request in the same row without a pause of LOOK_BACK."""
        for earlier in self._runs_before(forward, row):
            forward = earlier.forward
        return forward

    def origin(
        self,
        forward: int,
        row: int,
        position: int | None = None,
        kind: PoolKind = PoolKind.FULL,
    ) -> str | None:
        """Where the KV that `forward` checked in `row`, at `position`, came from. None: no forward of an arrival.

        `kind`: the pool in which it lies.
        """
        origin = self._origin(forward, row)
        return None if origin is None else origin.at(position, kind)

    def chunk(
        self, forward: int, row: int, position: int | None, kind: PoolKind = PoolKind.FULL
    ) -> int | None:
        """Number of the chunk that brought what `forward` checked at `position` of `row`. None: none is known."""
        origin = self._origin(forward, row)
        return None if origin is None else origin.chunk(position, kind)

    def _origin(self, forward: int, row: int) -> Origin | None:
        step = self.step_of(forward)
        return None if step is None else step.origins.get(row)

    def start_of(self, forward: int, row: int) -> int:
        """The first position that `forward` computed for `row`. 0 if it is not on record: none was earlier."""
        step = self.step_of(forward)
        if step is None or not step.starts:
            return 0
        if self._starts[0] is not step:  # findings come in the order of their forwards
            rows = (row for row, _ in _pairs(step.named))
            self._starts = step, dict(zip(rows, step.starts, strict=True))
        return self._starts[1].get(row, 0)

    def last_of(self, request_id: str) -> tuple[ForwardRecord, int] | None:
        """The last forward on record that ran a request, and its row. Looks through all forwards on record."""
        return next((found for found in self.search(request_id) if found is not None), None)

    def search(self, request_id: str) -> Iterator[tuple[ForwardRecord, int] | None]:
        """As `last_of`, with pauses: None after each SEARCHED_ROWS rows, then what was found, if anything.

        Forwards that are noted in a pause are not looked at.
        """
        searched: Names | None = None
        rows = 0
        for found in reversed(tuple(self._forwards.values())):
            if found.step is None or found.step.named is searched:
                continue
            searched = found.step.named
            for row, request in _pairs(searched):
                if request == request_id and row is not None:
                    yield found, row
                    return
            rows += len(searched)
            if rows >= SEARCHED_ROWS:
                rows = 0
                yield None

    def request_id(self, forward: int, row: int) -> str | None:
        found = self._forwards.get(forward)
        if found is None or found.step is None:
            return None
        return found.step.requests.get(row)


def _pairs(named: Names) -> Iterable[RequestName]:
    return named if type(named) is tuple else named.items()


def _place_of(named: Names, row: int, request: str, near: int) -> int | None:
    """Where in `named` the request is, 0 in a dict. None: nowhere. Quick if that is at `near` or a little behind.

    A step has the requests of the next one in the same order, and before them some that end with it.
    """
    if type(named) is not tuple:
        return 0 if named.get(row) == request else None
    for start, end in ((near, near + NEAR), (0, len(named))):
        with suppress(ValueError):
            return named.index((row, request), start, end)
    return None
