"""From launch to result: which step a result settles, however many batches are in flight."""

from __future__ import annotations

import itertools
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.errors import CanaryPhaseError
from sglang_kv_canary.wiring import scheduler as hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")


class Loop:
    """The two calls of a scheduler loop that are hooked, around the rig's forwards; the batches are SGLang's."""

    def __init__(self, rig: ManagerRig) -> None:
        self.rig, self._iterations = rig, itertools.count(1)

    def launch(self, row: int, damage: bool = False) -> ScheduleBatch:
        request = SimpleNamespace(req_pool_idx=row, rid=f"request-{row}")
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
    monkeypatch.setattr(context, "named", None)
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


def test_clean_steps_report_nothing(loop: Loop) -> None:
    for batch in (loop.launch(1), loop.launch(2)):
        loop.process(batch)
    assert loop.rig.settle() == []


def test_a_server_that_becomes_idle_copies_at_once_and_then_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = ManagerRig(copy_every_s=1e9)
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


def _named(requests: list[SimpleNamespace]) -> dict[int, str]:
    """What the next step of these requests is recorded as."""
    step = hooks._begin_step(SimpleNamespace(reqs=list(requests)))
    hooks._end_step()
    return step.requests


def test_requests_that_stay_keep_their_names_until_a_row_is_given_back(loop: Loop) -> None:
    one, two = (SimpleNamespace(req_pool_idx=row, rid=f"request-{row}") for row in (1, 2))
    none = SimpleNamespace(req_pool_idx=None, rid="no row")
    named = {1: "request-1", 2: "request-2"}
    assert _named([one, two]) == _named([one, two]) == named
    kept = context.named
    assert _named([one, two]) == named
    assert context.named is kept  # no request was looked at
    assert list(_named([two, one])) == [2, 1]
    assert _named([one]) == {1: "request-1"}
    assert _named([one, two]) == named
    context.row_released(1)  # retracted, and prefilled again in another row
    one.req_pool_idx = 3
    assert _named([one, two]) == {3: "request-1", 2: "request-2"}
    assert _named([one, none]) == {3: "request-1"}
    none.req_pool_idx = 1
    assert _named([one, none]) == {3: "request-1", 1: "no row"}


@pytest.mark.parametrize("loop", [CanaryMode.RAISE], indirect=True)
def test_result_of_a_batch_that_nobody_launched_is_refused(loop: Loop) -> None:
    batch = loop.launch(1)
    loop.process(batch)
    with pytest.raises(CanaryPhaseError, match=r"mode DECODE .*launch was not seen"):
        loop.process(batch)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
