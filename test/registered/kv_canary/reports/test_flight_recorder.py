"""What the flight recorder keeps of rows and requests, and what it takes to keep and to find it."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import VIOLATION_COLUMNS, Column
from sglang_kv_canary.reports import flight_recorder
from sglang_kv_canary.reports.flight_recorder import (
    LOOK_BACK,
    MAX_BY_ROW,
    RELEASE_STEPS,
    FlightRecorder,
)
from sglang_kv_canary.reports.known_findings import KnownReaders, finding_keys
from sglang_kv_canary.wiring import scheduler
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.rig_request import RigRequest

register_cpu_ci(est_time=6, suite="stage-a-test-cpu")

REQUESTS = 512
STEPS = 1024
LATEST = 256  # steps after its forward a finding may be read

Names = tuple[tuple[int | None, str], ...]


def names(first: str = "req-0") -> Names:
    return ((1, first), *((row, f"req-{row}") for row in range(2, REQUESTS + 1)))


def steps_of(*named: Names | dict[int, str]) -> FlightRecorder:
    """A forward for each step, numbered from 1 on."""
    recorder = FlightRecorder()
    for each in named:
        run(recorder, each)
    return recorder


def run(recorder: FlightRecorder, named: Names | dict[int, str], mode: str = "DECODE") -> int:
    forward = recorder.newest + 1
    step = recorder.begin_step(named)
    recorder.note_forward(forward, mode)
    recorder.end_step()
    recorder.result_arrived(step)
    return forward


# Memory


def bytes_kept_by(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def one_finding_in(forward: int) -> np.ndarray:
    rows = np.zeros((1, VIOLATION_COLUMNS), dtype=np.int64)
    rows[0, [Column.READER_FORWARD, Column.READER_ROW]] = forward, 3
    return rows


@pytest.mark.parametrize("by", ["keys", "readers", "question", "owners", "first forward"])
def test_a_look_at_each_step_of_the_same_requests_keeps_one_dict(by: str) -> None:
    recorder, readers = steps_of(*[names()] * STEPS), KnownReaders()

    def look() -> None:
        if by == "question":
            recorder.last_of("nobody")
        for forward in range(1, STEPS + 1):
            if by == "keys":
                finding_keys(one_finding_in(forward), recorder)
            elif by == "readers":
                readers.new_in(one_finding_in(forward), recorder)
        if by == "owners":
            recorder.owners()
        elif by == "first forward":
            recorder.first_of(STEPS, 3)

    dict_bytes = sys.getsizeof(dict(names()))
    assert bytes_kept_by(look) < 3 * dict_bytes


def test_of_steps_with_other_requests_each_the_newest_dicts_are_kept() -> None:
    recorder = steps_of(*(names(f"first-{n}") for n in range(STEPS)))

    def look() -> None:
        for forward in range(1, STEPS + 1):
            assert recorder.request_id(forward, 1) == f"first-{forward - 1}"

    assert bytes_kept_by(look) < 1.2 * MAX_BY_ROW * sys.getsizeof(dict(names()))
    latest = recorder.step_of(STEPS)
    assert latest.requests is latest.requests


def test_releases_of_a_row_are_bounded() -> None:
    recorder = FlightRecorder()
    for _ in range(3 * RELEASE_STEPS):
        run(recorder, ((1, "a"),))
        recorder.row_released(1)
        recorder.row_released(1)  # of a session: each turn may give back a part
    assert len(recorder._steps.released[1]) <= RELEASE_STEPS + 1


def serve(recorder: FlightRecorder, steps: int) -> None:
    """Decode steps of the same requests, by the scheduler's hook. In step n, row r computes position 1000 r + n."""
    requests = [RigRequest(row, rid=f"req-{row}") for row in range(REQUESTS)]
    for number in range(1, steps + 1):
        step = scheduler._begin_step(SimpleNamespace(reqs=list(requests), number=number))
        recorder.note_forward(number, "DECODE")
        scheduler._end_step()
        recorder.result_arrived(step)


@pytest.fixture
def asked() -> FlightRecorder:
    """The recorder of this process, and an action asks it for first positions."""
    context.recorder = FlightRecorder()
    context.starts_of = lambda batch: [1000 * row + batch.number for row in range(REQUESTS)]
    return context.recorder


@pytest.mark.usefixtures("asked")
def test_first_positions_take_little_room_and_are_kept_while_findings_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside what the recorder keeps of these steps anyway."""
    monkeypatch.setattr(flight_recorder, "RELEASE_STEPS", 32)
    starts_of, kept = context.starts_of, []
    for context.starts_of in (None, None, starts_of):  # the first time, names are kept as well
        context.recorder = FlightRecorder()
        kept.append(bytes_kept_by(lambda: serve(context.recorder, 128)))
    assert kept[2] - kept[1] < 1.2 * 32 * 4 * REQUESTS


def test_a_first_position_is_that_of_its_forward_and_row(asked: FlightRecorder) -> None:
    """Where it is no longer known, damage is taken to reach back to the first token."""
    last = RELEASE_STEPS + LATEST
    serve(asked, last)
    asked.note_forward(last + 1, "DECODE")  # of no step
    for forward in (last - LATEST, last, last - LATEST):
        rows = (0, REQUESTS - 1, 7)
        found = [asked.start_of(forward, row) for row in rows]
        assert found == [1000 * row + forward for row in rows]
    others = ((last, REQUESTS), (last - RELEASE_STEPS, 7), (last + 1, 7), (last + 2, 7))
    assert [asked.start_of(*each) for each in others] == [0] * 4


# Search


class CountedName(str):
    """A request id that counts its comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_search_looks_once_at_names_that_steps_share() -> None:
    recorder = steps_of(*[names()] * STEPS)
    CountedName.compared = 0
    assert recorder.last_of(CountedName("nobody")) is None
    assert CountedName.compared == REQUESTS


def test_the_last_forward_of_a_request_is_found_among_others() -> None:
    shared, prefill = names(), ((None, "gone"), (7, "new"))
    recorder = steps_of(shared, shared, prefill, shared, {9: "arrived"})
    found = {name: recorder.last_of(name) for name in ("req-9", "new", "arrived", "gone", "x")}
    places = {name: None if at is None else (at[0].forward, at[1]) for name, at in found.items()}
    assert places == {"req-9": (4, 9), "new": (3, 7), "arrived": (5, 9), "gone": None, "x": None}


def test_a_search_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "SEARCHED_ROWS", 2 * REQUESTS)
    recorder = steps_of(*(names(f"first-{n}") for n in range(9)))
    assert list(recorder.search("nobody")) == [None] * 4
    search = recorder.search("first-1")
    assert [next(search), next(search)] == [None, None]
    run(recorder, names("first-9"))  # steps go on
    *pauses, (forward, row) = search
    assert (pauses, forward.forward, row) == ([None], 2, 1)


# Releases


@pytest.mark.parametrize("later", [0, 8, LATEST])
def test_a_row_that_was_given_back_before_a_finding_has_no_other_owner(later: int) -> None:
    recorder = FlightRecorder()
    before = run(recorder, ((1, "before"),))
    recorder.row_released(1)
    victim = run(recorder, ((1, "victim"),))
    for n in range(later):
        recorder.row_released(1)
        run(recorder, ((1, f"later-{n}"),))
    assert recorder.other_owner(victim, 1) is None
    assert recorder.was_released(1, before, victim) is True


@pytest.mark.parametrize("later", [0, 8, LATEST])
def test_one_that_was_not_given_back_has(later: int) -> None:
    recorder = FlightRecorder()
    before = run(recorder, ((1, "before"),))
    victim = run(recorder, ((1, "victim"),))
    for n in range(later):
        recorder.row_released(1)
        run(recorder, ((1, f"later-{n}"),))
    assert recorder.other_owner(victim, 1) == ("before", before)
    assert recorder.was_released(1, before, victim) is False


@pytest.mark.parametrize("later", [0, 8, LATEST])
@pytest.mark.parametrize("again", [False, True])
def test_the_forward_before_is_of_the_same_run(later: int, again: bool) -> None:
    """A client may use an id again."""
    recorder = FlightRecorder()
    before = run(recorder, ((1, "ada"),))
    if again:
        recorder.row_released(1)
    victim = run(recorder, ((1, "ada"),))
    for n in range(later):
        recorder.row_released(1)
        run(recorder, ((1, f"later-{n}"),))
    found = recorder.previous_of(victim, 1)
    assert (None if found is None else found.forward) == (None if again else before)
    assert recorder.first_of(victim, 1) == (victim if again else before)


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_no_longer_known_is_not_claimed(shared: bool) -> None:
    recorder = FlightRecorder()
    before = run(recorder, ((1, "ada"),))
    if not shared:
        recorder.row_released(1)
    victim = run(recorder, ((1, "bob"),))
    same = run(recorder, ((1, "bob"),))
    for n in range(RELEASE_STEPS + 2):
        recorder.row_released(1)
        run(recorder, ((1, f"later-{n}"),))
    assert recorder.was_released(1, before, victim) is None
    assert recorder.other_owner(victim, 1) is None
    assert recorder.previous_of(same, 1) is None


def test_a_row_that_is_kept_for_long_was_given_back_before_that() -> None:
    recorder = FlightRecorder()
    before = run(recorder, ((1, "ada"),))
    recorder.row_released(1)
    first = run(recorder, ((1, "ada"),))
    for _ in range(2 * RELEASE_STEPS):
        last = run(recorder, ((1, "ada"),))
    recorder.row_released(1)
    assert recorder.was_released(1, before, last) is True
    assert recorder.was_released(1, first, last) is False
    assert recorder.first_of(last, 1) == first


# Requests that run on


def test_the_first_forward_of_a_request_among_others_that_come_and_go() -> None:
    """Each step ends one request and begins another, so the place of the rest changes."""
    recorder, running = FlightRecorder(), [(row, f"first-{row}") for row in range(1, 200)]
    began = {}
    for n in range(400):
        row, _ = running.pop(n * 7 % len(running))
        recorder.row_released(row)
        running.append((row, f"later-{n}"))
        began[f"later-{n}"] = run(recorder, tuple(running))
        if n % 3 == 0:
            run(recorder, ((500 + n, "prefill"),), "EXTEND")
    last = run(recorder, tuple(running))
    for row, name in running:
        assert recorder.first_of(last, row) == began.get(name, 1)


def test_a_pause_of_look_back_ends_a_run() -> None:
    recorder = steps_of(((1, "ada"),), *[((2, "bob"),)] * LOOK_BACK, ((1, "ada"),))
    assert recorder.first_of(LOOK_BACK + 2, 1) == LOOK_BACK + 2
    recorder = steps_of(((1, "ada"),), *[((2, "bob"),)] * (LOOK_BACK - 1), ((1, "ada"),))
    assert recorder.first_of(LOOK_BACK + 1, 1) == 1


def test_owners_are_those_of_the_last_forward_of_each_row() -> None:
    old, new = ((1, "ada"), (2, "bob"), (None, "gone")), ((1, "ada"), (3, "eve"))
    recorder = steps_of(old)
    recorder.row_released(2)
    for named in (new, new, old[:1]):
        run(recorder, named)
    assert recorder.owners() == {1: "ada", 3: "eve"}
    recorder.row_released(3)
    assert recorder.owners() == {1: "ada"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
