"""Results of forwards that the canary has not seen: SGLang no longer calls its hook there."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.errors import CanaryPhaseError
from sglang_kv_canary.runner.manager import MOST_UNSEEN
from sglang_kv_canary.runner.step_observer import StepObserver
from sglang_kv_canary.wiring import scheduler
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


class _Told(StepObserver):
    def __init__(self) -> None:
        self.results: list[int] = []

    def on_unseen_forwards(self, manager: Any, results: int) -> None:
        self.results.append(results)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> ManagerRig:
    rig = ManagerRig()
    rig.told = _Told()
    rig.manager.observers.append(rig.told)
    monkeypatch.setattr(context, "managers", [rig.manager])
    monkeypatch.setattr(context, "recorder", rig.recorder)
    return rig


def _take_up(rig: ManagerRig, mode: ForwardMode, count: int = 1) -> None:
    """Results of such batches. They stand for SGLang's, of which only these two attributes are read."""
    for _ in range(count):
        batch = SimpleNamespace(forward_iter=rig.recorder.step_count, forward_mode=mode)
        context.launched[batch.forward_iter] = rig.recorder.begin_step(((1, "a"),))
        rig.recorder.end_step()
        scheduler._result_arrived(batch)


def test_results_without_a_forward_are_told(rig: ManagerRig) -> None:
    _take_up(rig, ForwardMode.DECODE, MOST_UNSEEN)
    assert rig.told.results == []
    with pytest.raises(CanaryPhaseError):
        _take_up(rig, ForwardMode.EXTEND)
    assert rig.told.results == [MOST_UNSEEN + 1]


def test_nothing_is_told_while_forwards_are_not_checked(rig: ManagerRig) -> None:
    with rig.manager.disarmed():
        _take_up(rig, ForwardMode.DECODE, 2 * MOST_UNSEEN)
    assert rig.told.results == []


@pytest.mark.parametrize("mode", [ForwardMode.PREBUILT, ForwardMode.IDLE])
def test_batches_that_run_no_forward_are_not_told(rig: ManagerRig, mode: ForwardMode) -> None:
    """Requests of one token on a decode server: what has arrived is all of their answer."""
    _take_up(rig, mode, 3 * MOST_UNSEEN)
    assert rig.told.results == []


def test_each_forward_begins_the_count_again(rig: ManagerRig) -> None:
    for row in (1, 2, 3):
        rig.result(rig.extend(row, list(range(10))))
        _take_up(rig, ForwardMode.DECODE, MOST_UNSEEN)
    assert rig.told.results == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
