"""What a paused scheduler attends to. The end-to-end tests of the farewell and of live questions pause real servers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring import paused as module
from sglang_kv_canary.wiring import scheduler as scheduler_hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.paused import attend_while_paused
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=3, suite="stage-a-test-cpu")


class Scheduler:
    """A fake: a real one needs a process of its own to be paused. It has what a pause changes."""

    def __init__(self) -> None:
        self._engine_paused = False
        self.taken_up: list[str] = []

    def process_input_requests(self, messages: list[str]) -> int:
        self.taken_up += messages
        if "pause" in messages:
            self._engine_paused = True
        if "continue" in messages:
            self._engine_paused = False
        return len(messages)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> tuple[Scheduler, list[bool]]:
    """A scheduler that was just paused, twice, and whether it was paused each time that others were attended to."""
    monkeypatch.setattr(type(context), "active", True)
    monkeypatch.setattr(module, "PERIOD_S", 0.0)
    scheduler, attended = Scheduler(), []
    scheduler.process_input_requests(["pause"])
    for _ in range(2):
        attend_while_paused(scheduler, lambda: attended.append(scheduler._engine_paused))
    return scheduler, attended


def _loop(scheduler: Scheduler) -> None:
    for messages in ([], ["question"], [], ["continue"], [], ["answer"]):
        assert scheduler.process_input_requests(messages) == len(messages)


def test_others_are_attended_to_during_a_pause_only(paused: tuple[Scheduler, list[bool]]) -> None:
    scheduler, attended = paused
    _loop(scheduler)
    assert attended == [True] * 3
    assert scheduler.taken_up == ["pause", "question", "continue", "answer"]
    assert "process_input_requests" not in vars(scheduler)


def test_a_loop_that_does_not_rest_attends_now_and_then(
    paused: tuple[Scheduler, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 1e9)
    scheduler, attended = paused
    _loop(scheduler)
    assert attended == [True]


def test_a_method_that_another_plugin_has_put_into_the_object_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(context), "active", True)
    scheduler = Scheduler()
    before = _wrapped(scheduler)
    attend_while_paused(scheduler, lambda: None)
    _loop(scheduler)
    assert scheduler.process_input_requests is before


def test_a_wrapper_around_ours_stays(paused: tuple[Scheduler, list[bool]]) -> None:
    scheduler, attended = paused
    outer = _wrapped(scheduler)
    _loop(scheduler)
    assert scheduler.process_input_requests is outer
    assert attended == [True] * 3


def test_a_server_whose_canary_is_off_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(context), "active", False)
    scheduler = Scheduler()
    attend_while_paused(scheduler, lambda: None)
    assert "process_input_requests" not in vars(scheduler)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_what_is_found_after_the_last_result_is_reported_during_the_pause(
    monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """The fake: the result was taken up before its findings had come, which a CPU never does."""
    rig = ManagerRig()
    monkeypatch.setattr(type(context), "active", True)
    monkeypatch.setattr(context, "managers", [rig.manager])
    monkeypatch.setattr(module, "PERIOD_S", 0.0)
    rig.extend(1, range(20))
    rig.settle()
    if is_damaged:
        rig.pool.k_buffer[1][rig.slot(1, 5)] += 1
    rig.recorder.result_arrived(rig.decode([1]))
    scheduler = Scheduler()
    scheduler.process_input_requests(["pause"])
    scheduler_hooks._after_pause(None, scheduler)
    assert rig.reported == []
    scheduler.process_input_requests([])
    assert bool(rig.reported) == is_damaged


def _wrapped(scheduler: Scheduler) -> Callable[..., Any]:
    below = scheduler.process_input_requests

    def outer(*args: Any) -> Any:
        return below(*args)

    scheduler.process_input_requests = outer
    return outer


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
