"""Results of forwards that the canary has not seen: SGLang no longer calls its hook there."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.errors import CanaryPhaseError
from sglang_kv_canary.runner.manager import MOST_UNSEEN, REMIND_EVERY_S
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


def _run_the_model(rig: ManagerRig) -> None:
    """`model.forward`, which is bracketed, without `ModelRunner.forward`, which no longer is."""
    slots = rig.allocator.alloc(5)
    batch = rig._batch(ForwardMode.EXTEND, [2], range(5), range(5), slots)
    batch.extend_prefix_lens, batch.extend_seq_lens = torch.tensor([0]), torch.tensor([5])
    batch.extend_start_loc = torch.tensor([0])
    with rig.manager.bracket_model_forward(batch):
        pass


def _replay_a_graph(rig: ManagerRig) -> None:
    rig.manager.note_replay("DECODE")


@pytest.mark.parametrize("run", [_run_the_model, _replay_a_graph])
def test_a_forward_past_its_hook_stops_the_checks_at_once(
    rig: ManagerRig, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has applied the allocators' events before it: correct slots would look as if they were never stored."""
    rig.result(rig.extend(1, range(20)))
    run(rig)
    assert not rig.manager.armed
    assert "outside of a forward that the canary has seen" in rig.manager.errors.last
    assert "To resume, restart the server" in caplog.text
    rig.allocator.clear()
    rig.result(rig.extend(1, range(20)))
    assert not rig.manager.armed, "more such forwards may come after a flush"
    assert rig.settle() == []


@pytest.mark.parametrize("run", [_run_the_model, _replay_a_graph])
def test_forwards_of_a_capture_need_no_hook(rig: ManagerRig, run: Any) -> None:
    with rig.manager.disarmed():
        run(rig)
    assert rig.manager.armed
    assert rig.manager.errors.total == 0


def test_checks_that_have_stopped_are_said_again_without_forwards(
    rig: ManagerRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Forwards say it otherwise, and none is seen."""
    _replay_a_graph(rig)
    _take_up(rig, ForwardMode.DECODE, MOST_UNSEEN + 1)
    assert rig.told.results == []
    assert "still does not check" not in caplog.text
    now = time.monotonic()
    for passed, say in enumerate((lambda: _take_up(rig, ForwardMode.DECODE), rig.manager.on_idle)):
        now += REMIND_EVERY_S
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        say()
        assert caplog.text.count("still does not check the target runner") == 1 + passed


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
