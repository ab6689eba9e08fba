"""Remembers the requests of each forward, so that a violation can name them, and which of them were dead.

A forward is in flight from its launch until the scheduler processes its result. If a request's row is given back in
that time, the request is dead in that forward. What the forward saw of it is moot: findings are dropped as stale.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..record import FORWARD_MASK
from .origin import Origin
from .weight_history import WeightHistory

MAX_FORWARDS = 8192  # forwards that reports can still look up
LOOK_BACK = 64  # forwards in which a request's previous forward is looked for
MAX_RELEASES = 8  # of a row that are remembered


# Row of a request, and its id, as they were at a launch. None: it has no row.
RequestName = tuple[int | None, str]


def _is_unknown() -> bool:
    return False


@dataclass(slots=True)
class StepRecord:
    """One scheduler step. What only findings ask for is worked out when one does: there is no time in each step."""

    step: int
    named: dict[int, str] | tuple[RequestName, ...]  # row -> request id, in batch order
    released: set[int] = field(
        default_factory=set
    )  # given back while it was in flight, of any request
    rewritten: set[int] = field(default_factory=set)  # re-pointed in that time, of any request
    in_flight: bool = True
    # Without a result it is over as soon as a later step's arrives, or the device has completed its forwards.
    has_result: bool = True
    is_complete: Callable[[], bool] = _is_unknown  # asked of a step without a result
    origins: Mapping[int, Origin] = field(default_factory=dict)  # row -> where its KV came from
    # row -> first position that the step computes; empty unless an action asks for it
    starts: Mapping[int, int] = field(default_factory=dict)

    @property
    def requests(self) -> dict[int, str]:
        """Request id of each row, in batch order."""
        if type(self.named) is tuple:
            self.named = dict(self.named)
            self.named.pop(None, None)
        return self.named

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
    # row -> steps after which it was given back, oldest first
    released: dict[int, deque[int]] = field(default_factory=dict)
    in_flight: deque[StepRecord] = field(
        default_factory=deque
    )  # whose result has not arrived, oldest first
    without_result: int = 0  # of them, those that have none


class FlightRecorder:
    """The last MAX_FORWARDS forwards of one model runner. Used from the scheduler's thread only.

    Each model runner numbers its own forwards, so `for_runner` gives each a recorder.
    """

    def __init__(self, max_forwards: int = MAX_FORWARDS, steps: Steps | None = None) -> None:
        self._forwards: OrderedDict[int, ForwardRecord] = OrderedDict()  # oldest first
        self._newest = 0
        self._max_forwards = max_forwards
        self._steps = Steps() if steps is None else steps
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
        starts: Mapping[int, int] | None = None,
        given_back: Iterable[int] = (),
    ) -> StepRecord:
        """A scheduler step is about to launch its forwards. `requests`: rows and their request ids.

        `origins`: of a step that checks what has arrived, where each row's KV came from. Such a step has no result.
        `starts`: the first position that the step computes, of each row.
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
        return max(low, self._newest - ((self._newest - low) & FORWARD_MASK))

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
        steps = self._steps.released.get(row)
        if steps is None:
            steps = self._steps.released[row] = deque(maxlen=MAX_RELEASES)
        steps.append(self._steps.count)

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
        """The forwards on record from number `first` to `last`. Looks through all of them."""
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
        """The last forward before `forward` that ran the same request. None if not among the last LOOK_BACK.

        A client may use a request id again: then the row was given back in between.
        """
        request = self.request_id(forward, row)
        if request is None:
            return None
        for earlier in range(forward - 1, max(0, forward - 1 - LOOK_BACK), -1):
            if self.request_id(earlier, row) == request:
                is_same_run = not self.was_released(row, earlier, forward)
                return self._forwards[earlier] if is_same_run else None
        return None

    def was_released(self, row: int, earlier: int, later: int) -> bool:
        """Whether the host gave `row` back between two forwards on record."""
        first, last = self.step_of(earlier), self.step_of(later)
        if first is None or last is None:
            return False
        return any(first.step <= step < last.step for step in self._steps.released.get(row, ()))

    def other_owner(self, forward: int, row: int) -> tuple[str, int] | None:
        """(request id, forward): who ran in `row` before and has not given it back. In the last LOOK_BACK forwards.

        A row has one request at a time. Rows are handed out again only after they were given back.
        """
        request = self.request_id(forward, row)
        if request is None:
            return None
        for earlier in range(forward - 1, max(0, forward - 1 - LOOK_BACK), -1):
            if self.was_released(row, earlier, forward):
                return None
            other = self.request_id(earlier, row)
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
        for forward in range(self._newest, max(0, self._newest - LOOK_BACK), -1):
            found = self._forwards.get(forward)
            if found is None or found.step is None:
                continue
            for row, request in found.step.requests.items():
                if self._released_last(row) < found.step.step:
                    owners.setdefault(row, request)
        return owners

    def _released_last(self, row: int) -> int:
        """The last step after which `row` was given back; 0: never."""
        steps = self._steps.released.get(row)
        return steps[-1] if steps else 0

    def first_of(self, forward: int, row: int) -> int:
        """The first forward on record that ran the same request in the same row without a pause of LOOK_BACK."""
        while (earlier := self.previous_of(forward, row)) is not None:
            forward = earlier.forward
        return forward

    def origin(
        self, forward: int, row: int, position: int | None = None, is_windowed: bool = False
    ) -> str | None:
        """Where the KV that `forward` checked in `row`, at `position`, came from. None: no forward of an arrival.

        `is_windowed`: in the pool of layers with a sliding window.
        """
        origin = self._origin(forward, row)
        return None if origin is None else origin.at(position, is_windowed)

    def chunk(
        self, forward: int, row: int, position: int | None, is_windowed: bool = False
    ) -> int | None:
        """Number of the chunk that brought what `forward` checked at `position` of `row`. None: none is known."""
        origin = self._origin(forward, row)
        return None if origin is None else origin.chunk(position, is_windowed)

    def _origin(self, forward: int, row: int) -> Origin | None:
        step = self.step_of(forward)
        return None if step is None else step.origins.get(row)

    def start_of(self, forward: int, row: int) -> int:
        """The first position that `forward` computed for `row`. 0 if it is not on record."""
        found = self._forwards.get(forward)
        return 0 if found is None or found.step is None else found.step.starts.get(row, 0)

    def last_of(self, request_id: str) -> tuple[ForwardRecord, int] | None:
        """The last forward on record that ran a request, and its row. Looks through all forwards on record."""
        seen: StepRecord | None = None
        for found in reversed(self._forwards.values()):
            if found.step is None or found.step is seen:
                continue
            seen = found.step
            for row, request in seen.requests.items():
                if request == request_id:
                    return found, row
        return None

    def request_id(self, forward: int, row: int) -> str | None:
        found = self._forwards.get(forward)
        if found is None or found.step is None:
            return None
        return found.step.requests.get(row)
