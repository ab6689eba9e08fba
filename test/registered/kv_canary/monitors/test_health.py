"""The health check says that kernels stopped, within its period, and says nothing of servers that are well or idle."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import Action, CanaryMode, ContentMode
from sglang_kv_canary.endpoint import Part
from sglang_kv_canary.errors import CanaryHealthError, CanaryPhaseError
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.monitors import health
from sglang_kv_canary.monitors.health import MIN_SILENT_STEPS, HealthCheck
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.reports.async_copy import FutureTensors
from sglang_kv_canary.reports.violation_reporter import LAST_WORDS_ENV
from sglang_kv_canary.runner.step_observer import StepObserver, Summary
from sglang_kv_canary.state import Header
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

pytestmark = pytest.mark.usefixtures("sweeps_never_rest")

PERIOD = 10


class WatchedRig(TreeRig):
    """A TreeRig under a health check, and a sweep unless it stands for a draft runner."""

    def __init__(self, kind: str = "mha", sweep: bool = True, **settings: Any) -> None:
        super().__init__(kind, **{"health_check_interval": PERIOD, "sweep_interval": 1, **settings})
        config, groups, sink = self.manager.config, self.manager.groups, self.manager.sink
        self.sweep = SweepOrchestrator(config, groups, sink) if sweep else None
        self.health = HealthCheck(config, groups, sink, "target" if sweep else "draft", self.sweep)
        self.manager.observers += [o for o in (self.sweep, self.health) if o]
        self.manager.attach_radix_cache(self.tree)
        self.req = self.admit(list(range(10, 40)))

    def steps(self, count: int) -> None:
        for i in range(count):
            self.decode_request(self.req, 40 + i)
            self.manager.drain()  # as the scheduler does with each result


@pytest.fixture
def events(tmp_path: Path) -> str:
    return str(tmp_path / "events.jsonl")


def _health_events(path: str) -> list[dict[str, Any]]:
    lines = Path(path).read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == "health"]


def _stop(monkeypatch: Any, name: str, side: Side | None = None) -> None:
    """The test hook: kernel function `name` does nothing any more, on one side where given."""
    original = getattr(reference, name)

    def stopped(*args: Any, **kwargs: Any) -> None:
        if side is not None and side not in args:
            original(*args, **kwargs)

    monkeypatch.setattr(reference, name, stopped)


@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
@pytest.mark.parametrize("mode", list(CanaryMode)[1:])
def test_a_server_that_checks_is_healthy(kind: str, mode: CanaryMode, events: str) -> None:
    rig = WatchedRig(kind, mode=mode, event_file=events)
    rig.steps(2 * PERIOD)
    rig.idle(2 * PERIOD)
    rig.steps(2 * PERIOD)
    assert rig.health.checks >= 3
    assert (rig.health.healthy, rig.health.failures) == (True, 0)
    assert [e["healthy"] for e in _health_events(events)] == [True]  # once, not each period


def _padding(size: int) -> ForwardBatch:
    """What a capture runs the model with."""
    zeros = torch.zeros(size, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        input_ids=zeros,
        req_pool_indices=zeros,
        seq_lens=torch.ones(size, dtype=torch.int32),
        out_cache_loc=zeros,
        seq_lens_sum=size,
        positions=zeros,
    )


@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize("idles", [0, 1, 3 * PERIOD])
def test_captures_of_an_idle_server_are_no_forwards_without_checks(sweep: bool, idles: int) -> None:
    """An update of the weights may capture graphs again, with forwards that nothing checks."""
    rig = WatchedRig(mode=CanaryMode.RAISE, sweep=sweep)
    rig.steps(2 * PERIOD)
    rig.finish(rig.req)
    for _ in range(3):
        rig.idle(idles)
        with rig.manager.disarmed():
            for size in (2, 2, 1, 1):
                with rig.manager.bracket_model_forward(_padding(size)):
                    pass
        rig.tree.reset()
        rig.allocator.clear()
        rig.idle(3 * PERIOD)
    checks = rig.health.checks
    rig.req = rig.admit(list(range(10, 40)))
    rig.steps(3 * PERIOD)
    assert rig.health.checks > checks
    assert (rig.health.healthy, rig.health.failures) == (True, 0)


def test_kernels_that_stop_after_a_capture_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = WatchedRig(sweep=False, mode=CanaryMode.RAISE)
    rig.steps(2 * PERIOD)
    with rig.manager.disarmed(), rig.manager.bracket_model_forward(_padding(2)):
        pass
    _stop(monkeypatch, "check_and_write", Side.TAIL)
    with pytest.raises(CanaryHealthError, match="did not run: TAIL_K_FULL"):
        rig.steps(5 * PERIOD)


def test_counters_that_are_not_due_are_not_missed(events: str) -> None:
    rig = WatchedRig(sweep=False, event_file=events, copy_every_s=60.0)
    rig.steps(MIN_SILENT_STEPS + 6)
    assert (rig.health.healthy, rig.health.failures) == (True, 0)


@pytest.mark.parametrize(
    "settings", [{"mode": CanaryMode.RAISE}, {"action": Action.ABORT}], ids=["raise", "abort"]
)
def test_counters_that_come_sooner_than_the_ones_before_are_not_missed(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy arrives when the device has come to it: after 9 ms, and later after 1 ms."""
    rig = WatchedRig(sweep=False, copy_every_s=0.5, **settings)
    now, step_s = time.monotonic() + 60, 0.011
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for i in range(160):
        rig.decode_request(rig.req, 40 + i)
        waits = 0.009 if i < 60 else 0.001
        now += waits
        rig.manager.drain()
        now += step_s - waits
    assert rig.health.checks > 1
    assert rig.health.failures == 0


@pytest.mark.parametrize(
    ("function", "side", "tags"),
    [
        ("check_and_write", Side.TAIL, {"TAIL_K_FULL", "TAIL_V_FULL"}),
        ("check_and_write", Side.HEAD, {"HEAD_K_FULL", "HEAD_V_FULL"}),
        (
            "check_and_write",
            None,
            {"HEAD_K_FULL", "HEAD_V_FULL", "TAIL_K_FULL", "TAIL_V_FULL"},
        ),
        ("check_list", None, {"SWEEP_K_FULL", "SWEEP_V_FULL"}),
    ],
)
def test_stopped_kernels_are_named_within_the_period(
    function: str, side: Side | None, tags: set[str], events: str, monkeypatch: Any, caplog: Any
) -> None:
    rig = WatchedRig(event_file=events)
    rig.serve(list(range(100, 120)))  # something to sweep
    rig.steps(PERIOD + 2)
    assert rig.health.healthy
    _stop(monkeypatch, function, side)
    # One period from the last check at worst, plus a whole one without a single launch, plus the copy's delay.
    rig.steps(2 * PERIOD + 1)
    assert not rig.health.healthy
    last = _health_events(events)[-1]
    assert (last["healthy"], set(last["tags"])) == (False, tags)
    assert all(tag in caplog.text for tag in tags)
    assert "ran 0 times" not in caplog.text  # a silent TAIL is one problem, not two


def test_a_server_that_recovers_says_so_once(events: str, monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    rig = WatchedRig(event_file=events)
    rig.steps(PERIOD + 2)
    with monkeypatch.context() as patch:
        _stop(patch, "check_list")
        rig.serve(list(range(100, 120)))
        rig.steps(2 * PERIOD)
    assert not rig.health.healthy
    assert "healthy again" not in caplog.text
    rig.steps(2 * PERIOD + 2)
    assert caplog.text.count("healthy again on the target runner") == 1
    last = _health_events(events)[-1]
    assert last["healthy"]
    assert 0 < last["forwards"] < last["step"]


def test_swa_tags_are_named_too(events: str, monkeypatch: Any) -> None:
    rig = WatchedRig("swa", event_file=events)
    original = reference.check_and_write

    def without_swa(plan: Any, group: Any, *launch: Any) -> None:
        if group.swa_index_lut is None:
            original(plan, group, *launch)

    monkeypatch.setattr(reference, "check_and_write", without_swa)
    rig.steps(2 * PERIOD + 1)
    assert set(_health_events(events)[-1]["tags"]) == {
        f"{side}_{half}_SWA" for side in ("HEAD", "TAIL") for half in ("K", "V")
    }


def test_a_lost_check_of_the_prefix_is_named_though_its_records_are_written(
    events: str, monkeypatch: Any
) -> None:
    rig = WatchedRig(event_file=events)
    original = reference.check_and_write

    def without_branch(plan: Any, group: Any, side: Side, state: Any, part: Part) -> None:
        original(plan, group, side, state, part & ~Part.VERIFY if side is Side.TAIL else part)

    monkeypatch.setattr(reference, "check_and_write", without_branch)
    rig.steps(2 * PERIOD + 1)
    assert set(_health_events(events)[-1]["tags"]) == {"TAIL_K_FULL", "TAIL_V_FULL"}


def test_checks_lost_in_some_graphs_are_told_by_the_others(events: str, monkeypatch: Any) -> None:
    rig = WatchedRig(event_file=events)
    original, launched = reference.check_and_write, []

    def mostly(plan: Any, group: Any, side: Side, state: Any, part: Part) -> None:
        launched.append(side)
        lost = side is Side.TAIL and launched.count(Side.TAIL) % 5 == 0
        original(plan, group, side, state, part & ~Part.VERIFY if lost else part)

    rig.steps(2 * PERIOD + 2)
    assert rig.health.healthy
    monkeypatch.setattr(reference, "check_and_write", mostly)
    rig.steps(2 * PERIOD + 1)
    (problem,) = _health_events(events)[-1]["problems"]
    assert "TAIL of FULL ran" in problem


def test_raise_ends_with_the_tags_as_its_last_words(tmp_path: Path, monkeypatch: Any) -> None:
    last_words = tmp_path / "last_words"
    monkeypatch.setenv(LAST_WORDS_ENV, str(last_words))
    rig = WatchedRig(mode=CanaryMode.RAISE)
    _stop(monkeypatch, "check_and_write")
    with pytest.raises(CanaryHealthError, match=r"did not run: HEAD_K_FULL, TAIL_K_FULL") as info:
        rig.steps(2 * PERIOD + 1)
    assert last_words.read_text() == f"{info.value}\n"


def test_missing_fingerprints_are_unhealthy(events: str, monkeypatch: Any) -> None:
    rig = WatchedRig(event_file=events)
    _stop(monkeypatch, "check_and_write_content")
    rig.steps(2 * PERIOD + 1)
    (problem,) = _health_events(events)[-1]["problems"]
    assert "no content fingerprints" in problem
    assert "TAIL_K_FULL" in problem
    assert "TAIL_V_FULL" in problem


def test_no_fingerprints_are_expected_without_content_checks(monkeypatch: Any) -> None:
    rig = WatchedRig(mode=CanaryMode.RAISE, content=ContentMode.NONE)
    _stop(monkeypatch, "check_and_write_content")
    rig.steps(2 * PERIOD + 1)
    assert rig.health.healthy


@pytest.mark.parametrize("surplus", [1, -2])  # the first copy may have been one ahead
def test_the_device_must_have_counted_every_forward_once(surplus: int, events: str) -> None:
    rig = WatchedRig(event_file=events)
    rig.steps(PERIOD + 2)
    rig.manager.state.summary[0] += surplus  # a launch that was doubled, or is missing
    rig.steps(PERIOD + 2)
    (problem,) = _health_events(events)[-1]["problems"]
    assert "the device counted" in problem
    rig.steps(PERIOD + 2)  # nothing new happened since
    assert rig.health.healthy
    assert _health_events(events)[-1]["healthy"]


def test_a_copy_that_caught_the_next_forward_is_no_illness(events: str, monkeypatch: Any) -> None:
    """Nothing makes later forwards wait for a copy. What lasts is told at the next check."""
    rig = WatchedRig(event_file=events)
    from_host = Summary.from_host

    def late(summary: Any, point: Any, forward_ct: int) -> Summary:
        caught = summary.clone()
        caught[Header.FORWARD_DONE] += 1
        return from_host(caught, point, forward_ct + 1)

    for copies in (1, PERIOD):  # the first of all, and one later on
        monkeypatch.setattr(Summary, "from_host", late)
        rig.steps(copies)
        monkeypatch.undo()
        rig.steps(2 * PERIOD)
        assert rig.health.failures == 0
    monkeypatch.setattr(Summary, "from_host", late)
    rig.steps(2 * PERIOD + 1)
    assert "1 forwards more" in _health_events(events)[-1]["problems"][0]


def test_a_model_that_raises_is_not_the_canarys_illness() -> None:
    rig = WatchedRig(mode=CanaryMode.RAISE)
    for _ in range(3):
        rig.steps(PERIOD)
        with pytest.raises(RuntimeError, match="the model failed"):
            rig.extend(5, [1, 2, 3], fail=True)
        rig.lengths[5] = 0
    rig.steps(PERIOD)
    assert rig.health.failures == 0


def test_an_idle_server_is_not_unhealthy(monkeypatch: Any) -> None:
    rig = WatchedRig(mode=CanaryMode.RAISE, sweep=False)
    rig.steps(1)
    _stop(monkeypatch, "check_and_write")  # would be found if anything were expected
    rig.idle(5 * PERIOD)
    assert rig.health.healthy


@pytest.mark.parametrize("sweep", [True, False])
def test_the_first_request_after_a_long_idle_time_finds_a_healthy_server(sweep: bool) -> None:
    rig = WatchedRig(mode=CanaryMode.RAISE, sweep=sweep, sweep_interval=0 if not sweep else 1)
    rig.steps(PERIOD)
    rig.idle(2 * MIN_SILENT_STEPS)
    rig.steps(PERIOD)
    assert rig.health.failures == 0


def test_sweeps_that_stop_are_found_on_an_idle_server(events: str, monkeypatch: Any) -> None:
    rig = WatchedRig(event_file=events)
    rig.serve(list(range(100, 120)))
    rig.idle(2 * PERIOD)
    assert rig.health.healthy
    _stop(monkeypatch, "check_list")
    rig.idle(3 * PERIOD)
    assert set(_health_events(events)[-1]["tags"]) == {"SWEEP_K_FULL", "SWEEP_V_FULL"}


def test_the_very_first_sweep_is_missed_if_it_does_not_run(events: str, monkeypatch: Any) -> None:
    rig = WatchedRig(event_file=events, sweep_interval=PERIOD + 5)
    rig.serve(list(range(100, 120)))
    _stop(monkeypatch, "check_list")
    rig.steps(2 * PERIOD + 5)
    assert rig.sweep.launches.total() == 1
    assert set(_health_events(events)[-1]["tags"]) == {"SWEEP_K_FULL", "SWEEP_V_FULL"}


def test_sweep_tags_of_draft_runners_are_not_expected() -> None:
    rig = WatchedRig(mode=CanaryMode.RAISE, sweep=False)
    rig.steps(3 * PERIOD)
    assert rig.health.checks >= 2
    assert rig.health.healthy


def test_a_device_that_hands_over_no_counters_is_unhealthy(
    events: str, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(health, "MIN_SILENT_STEPS", 16)
    rig = WatchedRig(sweep=False, event_file=events, health_check_interval=1)
    monkeypatch.setattr(FutureTensors, "ready", lambda self: False)
    rig.steps(12)
    assert rig.health.healthy
    rig.steps(8)
    assert "no counters have arrived" in _health_events(events)[-1]["problems"][0]
    assert "unhealthy on the draft runner: no counters have arrived" in caplog.text


def test_forwards_that_nobody_has_seen_are_told(events: str, caplog: Any) -> None:
    rig = WatchedRig(sweep=False, event_file=events)
    rig.steps(2)
    rig.manager.unseen_results = 65
    with pytest.raises(CanaryPhaseError, match="got 65 results without one"):
        rig.manager.say_unseen()
    assert not rig.health.healthy
    problem = "no forward was seen before the last 65 results"
    assert [e["problems"] for e in _health_events(events) if not e["healthy"]] == [[problem]]
    assert problem in caplog.text
    rig.steps(3 * PERIOD)
    assert rig.health.healthy
    assert rig.manager.unseen_results == 0


def test_forwards_that_nobody_has_seen_end_a_server_in_raise_mode() -> None:
    rig = WatchedRig(sweep=False, mode=CanaryMode.RAISE)
    rig.steps(2)
    with pytest.raises(CanaryHealthError, match="no forward was seen"):
        rig.manager.say_unseen()


def test_nothing_is_expected_before_the_manager_is_armed(monkeypatch: Any) -> None:
    rig = WatchedRig(mode=CanaryMode.RAISE)
    with rig.manager.disarmed():
        rig.steps(3 * PERIOD)
    assert rig.health.checks == 0


class _Copies(StepObserver):
    """Counts the copies of the counters that arrive."""

    count = 0

    def on_summary(self, manager: Any, summary: Summary) -> None:
        self.count += 1


def test_an_idle_server_copies_nothing_for_its_health() -> None:
    rig = WatchedRig(sweep=False)
    copies = _Copies()
    rig.manager.observers.append(copies)
    rig.steps(1)
    rig.idle(2)
    before = copies.count
    rig.idle(3 * PERIOD)
    assert before > 0
    assert copies.count == before


class _Broken(StepObserver):
    def on_summary(self, manager: Any, summary: Summary) -> None:
        raise ValueError("broken reporter")

    def after_forwards(self, manager: Any) -> None:
        raise ValueError("broken reporter")


@pytest.mark.parametrize("mode", list(CanaryMode)[1:])
def test_a_reporter_that_raises_does_not_silence_the_others(
    mode: CanaryMode, events: str, monkeypatch: Any
) -> None:
    rig = WatchedRig(mode=mode, event_file=events)
    rig.manager.observers.insert(0, _Broken())
    _stop(monkeypatch, "check_and_write", Side.TAIL)
    for i in range(2 * PERIOD + 2):
        if mode is CanaryMode.LOG:
            rig.decode_request(rig.req, 40 + i)
            continue
        with pytest.raises(ValueError, match="broken reporter"):
            rig.decode_request(rig.req, 40 + i)
        rig.lengths[rig.row(rig.req)] += 1  # decode() did not get that far
    assert "TAIL_K_FULL" in _health_events(events)[-1]["tags"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
