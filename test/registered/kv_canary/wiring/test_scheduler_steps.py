"""From launch to result: which step a result settles, however many batches are in flight."""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.errors import CanaryPhaseError
from sglang_kv_canary.wiring import scheduler as hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.request_names import MOST_VOID, RequestNames
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.rig_request import RigRequest

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")


class Loop:
    """The two calls of a scheduler loop that are hooked, around the rig's forwards; the batches are SGLang's."""

    def __init__(self, rig: ManagerRig) -> None:
        self.rig, self._iterations = rig, itertools.count(1)

    def launch(self, row: int, damage: bool = False, has_row: bool = True) -> ScheduleBatch:
        request = RigRequest(row if has_row else None, rid=f"request-{row}")
        batch = ScheduleBatch(reqs=[request], forward_mode=ForwardMode.DECODE)

        def run_batch(_: Any, batch: ScheduleBatch) -> object:
            batch.forward_iter = next(self._iterations)
            if damage:
                self.rig.rows.req_to_token[row, 3] = self.rig.slot(row, 4)
            self.rig.decode([row], begin_step=False)
            return object()

        hooks._around_run_batch(run_batch, None, batch)
        return batch

    def process(self, batch: ScheduleBatch) -> None:
        """The result is another object than the one that `run_batch` returned, as under pipeline parallelism."""
        hooks._around_process_result(lambda *_: None, None, batch, object())
        self.rig.manager.drain(wait=True)


@pytest.fixture(params=[CanaryMode.LOG])
def loop(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Loop:
    rig = ManagerRig(mode=request.param)
    monkeypatch.setattr(context, "managers", [rig.manager])
    monkeypatch.setattr(context, "recorder", rig.recorder)
    monkeypatch.setattr(context, "names", RequestNames())
    for row in (1, 2):
        rig.result(rig.extend(row, range(10 * row, 10 * row + 8)))
    return Loop(rig)


def test_each_result_settles_its_own_step(loop: Loop) -> None:
    first, second = loop.launch(1, damage=True), loop.launch(2)
    assert len(loop.rig.scheduler_steps.in_flight) == 2
    loop.process(second)
    assert [s.requests for s in loop.rig.scheduler_steps.in_flight] == [{1: "request-1"}]
    assert loop.rig.reported == []
    loop.process(first)
    assert not loop.rig.scheduler_steps.in_flight
    assert {v.reader.request_id for v in loop.rig.reported} == {"request-1"}


@pytest.mark.parametrize(("found", "start", "errors"), [([8], 8, 0), ([8, 9], 0, 1)])
def test_first_positions_that_are_not_of_the_batch_are_not_kept(
    loop: Loop, found: list[int], start: int, errors: int
) -> None:
    context.starts_of = lambda batch: found
    loop.process(loop.launch(2))
    recorder, manager = loop.rig.recorder, loop.rig.manager
    assert recorder.start_of(recorder.newest, 2) == start
    assert (manager.errors.total, manager.armed) == (errors, True)


def test_clean_steps_report_nothing(loop: Loop) -> None:
    for batch in (loop.launch(1), loop.launch(2)):
        loop.process(batch)
    assert loop.rig.settle() == []


def test_a_server_that_becomes_idle_copies_at_once_and_then_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = ManagerRig(copy_every_s=1e9)
    rig.lose_what_is_published()
    monkeypatch.setattr(context, "managers", [rig.manager])
    monkeypatch.setattr(context, "recorder", rig.recorder)
    monkeypatch.setattr(context, "next_idle_tick", math.inf)  # no tick is due
    rig.result(rig.extend(1, range(8)))
    loop = Loop(rig)
    loop.process(loop.launch(1, damage=True))
    assert rig.reported == []
    hooks.after_idle(None, None)
    found = len(rig.reported)
    assert found > 0
    rig.rows.req_to_token[1, 3] = 0  # nobody runs, nobody looks
    hooks.after_idle(None, None)
    assert len(rig.reported) == found
    assert not rig.manager.owes_copy


class TestRestOfAPrefillServer:
    """While a thread sends KV, the scheduler's thread leaves Python's lock to it."""

    @pytest.fixture(autouse=True)
    def prefill_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = ManagerRig(copy_every_s=1e9)
        monkeypatch.setattr(context, "managers", [self.rig.manager])
        monkeypatch.setattr(context, "recorder", self.rig.recorder)
        monkeypatch.setattr(context, "next_idle_tick", 0.0)  # one is due
        monkeypatch.setattr(context, "sends_kv", True)
        monkeypatch.setattr(context, "rests_until", 0.0)
        monkeypatch.setattr(context, "attended_at", time.monotonic())
        monkeypatch.setattr(hooks, "REST_S", 1e9)
        monkeypatch.setattr(hooks, "IDLE_TICK_S", 0.0)
        self.rig.result(self.rig.extend(1, range(8)))
        self.asked: list[bool] = []
        monkeypatch.setattr(context, "attend_questions", self.asked.append)

    def answer(self) -> int:
        """A step that finds damage, its result, and an idle turn. Returns how much is reported then."""
        batch = Loop(self.rig).launch(1, damage=True)
        hooks._around_process_result(lambda *_: None, None, batch, object())
        hooks.after_idle(None, None)
        return len(self.rig.reported)

    def test_what_was_found_is_taken_up_after_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.answer() == 0
        monkeypatch.setattr(context, "rests_until", 0.0)
        hooks.after_idle(None, None)
        assert len(self.rig.reported) > 0

    def test_questions_are_attended_to_in_each_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An answer takes up to seven steps, and four of them wait for each other. Nobody waits longer than 10 s."""
        for _ in range(3):
            self.answer()
        assert self.asked == [False] * 3
        monkeypatch.setattr(context, "rests_until", 0.0)
        hooks.after_idle(None, None)
        assert self.asked == [False, False, False, True]

    def test_a_busy_server_takes_it_up_in_its_next_step(self) -> None:
        assert self.answer() == 0
        self.rig.result(self.rig.decode([1]))
        assert len(self.rig.reported) > 0

    def test_no_rest_for_a_server_that_nobody_has_attended_to(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(context, "attended_at", time.monotonic() - 2)
        found = self.answer()
        assert found > 0
        assert self.asked == [False, True]
        assert self.answer() == found  # it rests
        assert self.asked == [False, True, False]

    @pytest.mark.parametrize(
        ("name", "value"), [("sends_kv", False), ("containment", "some")], ids=str
    )
    def test_no_rest_for_others(
        self, monkeypatch: pytest.MonkeyPatch, name: str, value: object
    ) -> None:
        monkeypatch.setattr(context, name, value)
        assert self.answer() > 0
        assert self.asked == [False, True]


def test_overlap_processes_a_copy_of_the_batch(loop: Loop) -> None:
    loop.process(loop.launch(1).copy())
    assert not loop.rig.scheduler_steps.in_flight


def test_row_released_under_one_of_two_batches_is_moot_there_only(loop: Loop) -> None:
    first, second = loop.launch(1, damage=True), loop.launch(2, damage=True)
    loop.rig.recorder.row_released(1)
    loop.process(first)
    loop.process(second)
    assert {v.reader.request_id for v in loop.rig.settle()} == {"request-2"}
    assert loop.rig.manager.violations.moot > 0


@pytest.mark.parametrize("has_ended", [True, False])
def test_what_a_request_reads_that_ended_before_its_launch_is_moot(
    loop: Loop, has_ended: bool
) -> None:
    """SGLang takes up the last result first where the next batch was prepared already, as under a grammar."""
    loop.process(loop.launch(1))
    if has_ended:
        loop.rig.recorder.row_released(1)
        context.names.row_given_back(1)
    batch = loop.launch(1, damage=True, has_row=not has_ended)
    assert loop.rig.scheduler_steps.in_flight[0].requests == {1: "request-1"}
    loop.process(batch)
    found = {v.reader.request_id for v in loop.rig.settle()}
    assert found == (set() if has_ended else {"request-1"})
    assert bool(loop.rig.manager.violations.moot) == has_ended


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_row_that_another_request_has_by_now_is_not_given_back(
    loop: Loop, comes_first: bool
) -> None:
    old, new = _Request(1, "old"), _Request(1, "new")
    assert _looks_of([old]) == 1
    context.row_released(1)
    old.row = None
    batch = [new, old] if comes_first else [old, new]
    step = hooks._begin_step(SimpleNamespace(reqs=batch))
    assert (step.requests, step.released) == ({1: "new"}, set())


def _rows_given_back(*batch: _Request) -> set[int]:
    """Of a batch that is launched after the last result has been taken up."""
    step = hooks._begin_step(SimpleNamespace(reqs=list(batch)))
    hooks._end_step()
    return step.released


def _ends(*requests: _Request) -> None:
    for request in requests:
        context.row_released(request.row)
        request.row = None


def test_of_several_rows_of_a_request_the_last_one_is_given_back(loop: Loop) -> None:
    """Most of a batch is retracted, and its names are kept for long. One is admitted again in another row."""
    stays, again, *others = (_Request(row, f"request-{row}") for row in range(1, 6))
    _looks_of([stays, again, *others])
    _ends(again, *others)
    _looks_of([stays])
    again.row = 9
    _looks_of([again])
    _looks_of([stays, again])
    _ends(again)
    assert _rows_given_back(stays, again) == {9}


def test_of_several_requests_with_an_id_the_last_one_has_ended(loop: Loop) -> None:
    stays, first, *others = (_Request(row, f"request-{row}") for row in range(1, 6))
    _looks_of([stays, first, *others])
    _ends(first, *others)
    _looks_of([stays])
    second = _Request(9, first.rid)
    _looks_of([second])
    _looks_of([stays, second])
    _ends(second)
    assert _rows_given_back(stays, second) == {9}
    other = _Request(9, "other")
    assert _rows_given_back(stays, other, second) == set()


def test_nobody_has_a_row_after_the_step_of_a_request_that_ended_before(loop: Loop) -> None:
    loop.process(loop.launch(1))
    loop.rig.recorder.row_released(1)
    context.names.row_given_back(1)
    loop.process(loop.launch(1, has_row=False))
    recorder = loop.rig.recorder
    assert 1 not in recorder.owners()
    recorder.begin_step({1: "new"})
    recorder.note_forward(recorder.newest + 1, "EXTEND")
    recorder.end_step()
    assert recorder.other_owner(recorder.newest, 1) is None


def _named(requests: list[SimpleNamespace]) -> dict[int, str]:
    """What the next step of these requests is recorded as."""
    step = hooks._begin_step(SimpleNamespace(reqs=list(requests)))
    hooks._end_step()
    return step.requests


class _Request:
    """Counts the looks at its row: each is a cache miss."""

    looks: ClassVar[int] = 0

    def __init__(self, row: int | None, rid: str) -> None:
        self.row, self.rid = row, rid

    @property
    def kv(self) -> _Request:
        """Where newer releases keep the row."""
        return self

    @property
    def req_pool_idx(self) -> int | None:
        _Request.looks += 1
        return self.row


def _looks_of(requests: list[_Request]) -> int:
    """How many requests the next step looks at. Its names must be what they are called now."""
    before = _Request.looks
    named = _named(requests)
    looks = _Request.looks - before
    assert list(named.items()) == [(r.row, r.rid) for r in requests if r.row is not None]
    return looks


def test_requests_that_stay_keep_their_names_until_a_row_is_given_back(loop: Loop) -> None:
    one, two, three, *more = (_Request(row, f"request-{row}") for row in range(1, 8))
    assert _looks_of([one, two, *more]) == 6
    assert _looks_of([one, two, *more]) == 0
    kept = [hooks._begin_step(SimpleNamespace(reqs=[one, two, *more])).named for _ in range(2)]
    assert kept[0] is kept[1]  # records of equal batches share their names
    assert _looks_of([two, *more]) == 0  # one has ended
    assert _looks_of([three]) == 1  # a prefill, or another microbatch
    assert _looks_of([two, *more, three]) == 0
    assert _looks_of([three, two, *more]) == 5  # in another order: looked at again
    context.row_released(3)  # retracted, and prefilled again in another row
    three.row = 9
    assert _looks_of([three, two, *more]) == 1
    assert _looks_of([three, two, *more]) == 0


def test_a_row_that_another_request_gets_is_named_after_it(loop: Loop) -> None:
    old, new = _Request(1, "old"), _Request(1, "new")
    more = [_Request(row, f"request-{row}") for row in range(2, 6)]
    assert _looks_of([old, *more]) == 5
    context.row_released(1)
    assert _looks_of([new]) == 1
    assert _looks_of([*more, new]) == 0
    context.row_released(1)  # a session's row: the request keeps it, and gives a part of it back
    assert _looks_of([*more, new]) == 1


def test_a_request_that_is_looked_at_twice_has_one_name(loop: Loop) -> None:
    first, *more = (_Request(row, f"request-{row}") for row in range(1, 8))
    assert _looks_of([first, *more]) == 7
    assert _looks_of([more[5], first]) == 1  # a prefill of requests in another order
    context.row_released(1)
    first.row = 9
    assert _looks_of([first, *more]) == 1


def test_a_request_without_a_row_is_looked_at_again(loop: Loop) -> None:
    one, none = _Request(1, "one"), _Request(None, "none")
    assert _looks_of([one, none]) == 2
    none.row = 3
    assert _looks_of([one, none]) == 1
    assert _looks_of([one, none]) == 0


def test_names_of_random_steps_are_those_of_the_requests(loop: Loop) -> None:
    """Merged batches, chunks, microbatches, retraction, and requests that end while others run."""
    rng = random.Random(5)
    running: list[_Request] = []
    looks, named = 0, 0
    free, count = list(range(1, 200)), itertools.count()
    for _ in range(600):
        for request in rng.sample(running, min(len(running), rng.choice((0, 0, 1, 2, 40)))):
            context.row_released(request.row)
            free.append(request.row)
            request.row = None
            running.remove(request)
            if rng.random() < 0.3:  # retracted
                request.row = free.pop(rng.randrange(len(free)))
                running.append(request)
        new = [_Request(free.pop(0), f"r{next(count)}") for _ in range(min(len(free), 3))]
        if rng.random() < 0.4 and new:
            _looks_of(new)
            running += new
        elif new:
            free += [request.row for request in new]
        if running:
            looks, named = looks + _looks_of(running), named + len(running)
        if rng.random() < 0.2:
            _looks_of(running[::2])
    assert looks < named / 3


def test_requests_that_have_ended_are_not_kept(loop: Loop) -> None:
    """A prefill server runs many batches of new requests, which hold images."""
    ended = [_Request(row, f"r{row}") for row in range(1, 100)]
    alive = [weakref.ref(request) for request in ended]
    _looks_of([*ended[:40]])
    while ended:
        request = ended.pop()
        _looks_of([request])
        context.row_released(request.row)
        del request
    stays = _Request(200, "stays")
    _looks_of([stays])
    assert sum(each() is not None for each in alive) <= MOST_VOID + 1
    hooks.after_idle(None, None)
    assert all(each() is None for each in alive)


@pytest.mark.parametrize("loop", [CanaryMode.RAISE], indirect=True)
def test_result_of_a_batch_that_nobody_launched_is_refused(loop: Loop) -> None:
    batch = loop.launch(1)
    loop.process(batch)
    with pytest.raises(CanaryPhaseError, match=r"mode DECODE .*launch was not seen"):
        loop.process(batch)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
