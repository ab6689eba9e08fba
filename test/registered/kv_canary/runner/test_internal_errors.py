"""Errors of the canary's own host code: contained in mode log, counted, and never followed by a false alarm."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.errors import CanaryPhaseError
from sglang_kv_canary.launch.loads import LoadedPrefix, adopt_content
from sglang_kv_canary.monitors import metrics
from sglang_kv_canary.monitors.health import HealthCheck
from sglang_kv_canary.monitors.metrics import PREFIX, MetricFamilies, MetricsExporter
from sglang_kv_canary.monitors.statistics import StatisticsReporter
from sglang_kv_canary.plan.anchor import anchor_of
from sglang_kv_canary.plan.arrival import Arrival
from sglang_kv_canary.plan.expected_inputs import ExpectedTokens
from sglang_kv_canary.plan.plan_input import UnsupportedForwardError
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.reports import internal_errors as guard
from sglang_kv_canary.reports.internal_errors import InternalErrors, describe_error
from sglang_kv_canary.runner.manager import REMIND_EVERY_S
from sglang_kv_canary.runner.step_observer import StepObserver
from sglang_kv_canary.single_forward_manager import Phase
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import Header
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary.wiring import anchors, collect_hooks, scheduler
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.expected_tokens import expected_tokens_of
from sglang_kv_canary.wiring.hook_spec import HookType
from sglang_kv_canary.wiring.model_runner import _around_forward, wrap_model_forward
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.rig_request import RigRequest
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

pytestmark = pytest.mark.usefixtures("sweeps_never_rest")

LABELS = {"model_name": "tiny", "tp_rank": 0, "runner": "target"}


class Broken(Exception):
    """Raised on purpose, as a defect of the canary would be."""


def _broken(*_: Any, **__: Any) -> Any:
    raise Broken("on purpose")


def _events(path: Path, kind: str) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [e for e in map(json.loads, path.read_text().splitlines()) if e["event"] == kind]


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def in_context() -> Callable[[ManagerRig], ManagerRig]:
    """Makes a rig's manager that of the process, as `install_canary` does."""

    def enter(rig: ManagerRig) -> ManagerRig:
        context.recorder = rig.recorder
        context.add(rig.manager, rig)
        return rig

    return enter


def _flush(rig: ManagerRig) -> None:
    """What `/flush_cache` does, and the hook on the allocator's `clear`."""
    rig.allocator.clear()
    rig.manager.ledger.record(SlotEventKind.CLEAR, PoolKind.FULL, None, 1)
    rig.lengths = dict.fromkeys(rig.lengths, 0)


def _damage_is_found(rig: ManagerRig, row: int) -> None:
    """A fault at position 4 of `row` is reported, and nothing else."""
    known = len(rig.settle())
    rig.manager.groups[0].k_head[rig.slot(row, 4), 1] ^= 1
    rig.decode([row])
    assert {v.expected_position for v in rig.settle()[known:]} == {4, 5}


# Observers and reporters: checking goes on


def _run_a_while(rig: TreeRig) -> None:
    req = rig.admit(list(range(10, 40)))
    for i in range(8):
        rig.decode_request(req, 40 + i)
        rig.manager.drain()
    rig.idle(3)


OBSERVER_CALLS = ["after_forwards", "on_summary", "on_idle"]


@pytest.mark.parametrize("method", OBSERVER_CALLS)
def test_a_broken_observer_stops_neither_serving_nor_the_others(method: str, events: Path) -> None:
    rig = TreeRig(event_file=str(events))
    called: list[str] = []
    broken, well = StepObserver(), StepObserver()
    setattr(broken, method, _broken)
    setattr(well, method, lambda *_: called.append(method))
    rig.manager.observers += [broken, well]
    _run_a_while(rig)
    assert called
    assert rig.manager.errors.total == len(called)
    assert rig.manager.armed
    (event,) = _events(events, "internal_error")  # once a minute, however often
    assert event["error"] == "Broken: on purpose"
    assert any("test_internal_errors.py" in frame for frame in event["traceback"])
    req = rig.admit(list(range(200, 230)))
    rig.manager.groups[0].k_head[1:, 1] ^= 1
    rig.decode_request(req, 1)
    assert rig.settle() != []


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (HealthCheck, "_check"),
        (StatisticsReporter, "_event"),
        (SweepOrchestrator, "_advance"),
        (SweepOrchestrator, "_report"),
        (MetricsExporter, "publish"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_each_reporter_may_fail(owner: type, method: str, monkeypatch: Any, events: Path) -> None:
    rig = MeasuredRig(monkeypatch, events)
    monkeypatch.setattr(owner, method, _broken)
    _run_a_while(rig)
    assert rig.manager.errors.total > 0
    assert rig.manager.armed
    monkeypatch.undo()
    total = rig.manager.errors.total
    _run_a_while(rig)
    assert rig.manager.errors.total == total
    assert rig.settle() == []


def test_a_broken_violation_reporter_loses_no_count(caplog: Any) -> None:
    rig = ManagerRig()
    rig.result(rig.extend(1, range(20)))
    rig.manager.groups[0].k_head[rig.slot(1, 4), 1] ^= 1
    rig.manager.violations._reporter.log_or_raise_violation = _broken
    rig.result(rig.decode([1]))
    rig.settle()
    assert sum(rig.manager.violations.by_tag_and_reason.values()) > 0
    assert "internal error on the target runner" in caplog.text
    assert rig.manager.armed


def test_an_error_is_logged_although_the_event_sink_is_what_failed(
    caplog: Any, monkeypatch: Any
) -> None:
    rig = ManagerRig()
    monkeypatch.setattr(rig.manager.sink, "emit", _broken)
    rig.extend(1, range(20))
    rig.manager.groups[0].k_head[rig.slot(1, 4), 1] ^= 1
    rig.decode([1])
    rig.settle()
    assert "Broken: on purpose" in caplog.text
    assert rig.manager.errors.total > 0


def test_one_log_entry_a_minute_for_each_place(caplog: Any, monkeypatch: Any) -> None:
    rig = ManagerRig()
    rig.manager.observers.append(SimpleNamespace(**dict.fromkeys(OBSERVER_CALLS, _broken)))
    for row in (1, 2, 3):
        rig.result(rig.extend(row, range(20)))
    assert rig.manager.errors.total > 3
    assert caplog.text.count("kv-canary internal error") == 1
    monkeypatch.setattr(guard, "LOG_AGAIN_S", 0.0)
    rig.manager.errors._next_log.clear()
    rig.result(rig.decode([1]))
    assert caplog.text.count("kv-canary internal error") > 1


# Health, metrics


class MeasuredRig(TreeRig):
    """A TreeRig with every reporter, whose metrics go to a registry of their own."""

    def __init__(self, monkeypatch: Any, events: Path) -> None:
        monkeypatch.setattr(metrics, "PUBLISH_EVERY_S", 0.0)
        super().__init__(
            event_file=str(events), health_check_interval=3, sweep_interval=1, log_every_s=0.0
        )
        manager = self.manager
        config, groups, sink = manager.config, manager.groups, manager.sink
        sweep = SweepOrchestrator(config, groups, sink)
        health = HealthCheck(config, groups, sink, "target", sweep)
        self.registry = prometheus_client.CollectorRegistry()
        families = MetricFamilies(tuple(LABELS), self.registry)
        manager.observers += [
            sweep,
            health,
            StatisticsReporter(2, groups, sink, "target", sweep),
            MetricsExporter(groups, LABELS, families, health, sweep),
        ]
        manager.attach_radix_cache(self.tree)

    def value(self, name: str, **labels: str) -> float | None:
        merged = {k: str(v) for k, v in {**LABELS, **labels}.items()}
        return self.registry.get_sample_value(PREFIX + name, merged)


def test_an_error_shows_in_the_metrics_until_it_is_old(monkeypatch: Any, events: Path) -> None:
    rig = MeasuredRig(monkeypatch, events)
    _run_a_while(rig)
    assert (rig.value("healthy"), rig.value("active", mode="log", content="all")) == (1, 1)
    rig.manager.observers.insert(0, SimpleNamespace(**dict.fromkeys(OBSERVER_CALLS, _broken)))
    _run_a_while(rig)
    assert (rig.value("healthy"), rig.value("active", mode="log", content="all")) == (0, 1)
    assert rig.value("internal_errors_total", where="_broken") == rig.manager.errors.total
    assert _events(events, "statistics")[-1]["internal_errors"] > 0
    del rig.manager.observers[0]
    _run_a_while(rig)
    assert rig.value("healthy") == 0
    rig.manager.errors._last -= guard.UNHEALTHY_S
    rig.idle(2)
    assert rig.value("healthy") == 1


def test_checks_that_have_stopped_show_in_the_metrics(monkeypatch: Any, events: Path) -> None:
    rig = MeasuredRig(monkeypatch, events)
    _run_a_while(rig)
    rig.manager.lose_track()  # nothing idles, and no counters come from now on
    assert (rig.value("healthy"), rig.value("active", mode="log", content="all")) == (0, 0)


def test_checks_that_have_stopped_show_in_the_servers_answer(in_context: Any, events: Path) -> None:
    """`/server_info` must not go on with what was true at the start."""
    rig = in_context(ManagerRig(event_file=str(events)))
    rig.result(rig.extend(1, range(20)))
    before = _server_state()
    rig.manager.lose_track()
    after = _server_state()
    assert (before["runner"], before["rank"], before["mode"]) == ("target", 0, "log")
    assert (before["checking"], before["healthy"]) == (True, True)
    assert (after["checking"], after["healthy"]) == (False, False)


def test_findings_and_errors_show_in_the_servers_answer(in_context: Any, events: Path) -> None:
    rig = in_context(ManagerRig(event_file=str(events)))
    rig.result(rig.extend(1, range(20)))
    _damage_is_found(rig, 1)
    rig.manager.observers.append(BrokenObserver())
    rig.result(rig.decode([1]))
    state = _server_state()
    assert state["violations"] == rig.manager.violations.reported > 0
    assert (state["checking"], state["healthy"], state["internal_errors"]) == (True, False, 1)


class BrokenObserver(StepObserver):
    after_forwards = _broken


def _server_state() -> dict[str, Any]:
    """What the scheduler adds to SGLang's answer, after the way to the main process."""
    from sglang_kv_canary.wiring.server_info import after_internal_state

    answer = SimpleNamespace(internal_state={"last_gen_throughput": 1.0})
    assert after_internal_state(answer, SimpleNamespace(), SimpleNamespace()) is None
    assert answer.internal_state["last_gen_throughput"] == 1.0
    (state,) = json.loads(json.dumps(answer.internal_state))["kv_canary"]
    return state


def test_checks_that_have_stopped_are_said_again(monkeypatch: Any, caplog: Any) -> None:
    """The first line is soon far up in the log."""
    rig = ManagerRig()
    rig.result(rig.extend(1, range(20)))
    rig.manager.lose_track()
    rig.result(rig.decode([1]))
    assert caplog.text.count("kv-canary has stopped checking the target runner") == 1
    assert "kv-canary still does not check" not in caplog.text
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + REMIND_EVERY_S)
    rig.result(rig.decode([1]))
    rig.result(rig.decode([1]))
    assert caplog.text.count("kv-canary still does not check the target runner, for 600 s") == 1
    _flush(rig)
    rig.result(rig.extend(1, range(20)))
    caplog.clear()
    rig.result(rig.decode([1]))
    assert "kv-canary still does not check" not in caplog.text


# Where records go out of date


def _break_ledger(rig: ManagerRig, monkeypatch: Any) -> None:
    rig.manager.ledger.record(SlotEventKind.FREE, PoolKind.FULL, torch.tensor([200]), 1)
    monkeypatch.setattr(rig.manager.ledger, "_backend", None)


def _break_plan(rig: ManagerRig, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(rig.manager.plan_input), "fill_from_forward_batch", _broken)


def _break_head(rig: ManagerRig, monkeypatch: Any) -> None:
    _break_launch(monkeypatch, "HEAD")


def _break_tail(rig: ManagerRig, monkeypatch: Any) -> None:
    _break_launch(monkeypatch, "TAIL")


def _break_launch(monkeypatch: Any, side: str) -> None:
    from sglang_kv_canary.kernels import reference

    original = reference.check_and_write

    def launch(plan: Any, group: Any, at: Any, *args: Any) -> None:
        if at.value == side:
            raise Broken("on purpose")
        original(plan, group, at, *args)

    monkeypatch.setattr(reference, "check_and_write", launch)


def _break_phases(rig: ManagerRig, monkeypatch: Any) -> None:
    """The outside bracket is entered twice."""
    rig.manager._single_forwards[0].pre_ops_outside_graph()


STALE = {
    "slot events": _break_ledger,
    "plan": _break_plan,
    "HEAD": _break_head,
    "TAIL": _break_tail,
    "phases": _break_phases,
}


def _rig_after_a_broken_decode(
    break_it: Callable[[ManagerRig, Any], None], monkeypatch: Any, events: Path
) -> ManagerRig:
    rig = ManagerRig(event_file=str(events))
    rig.result(rig.extend(1, range(20)))
    with monkeypatch.context() as patch:
        break_it(rig, patch)
        rig.result(rig.decode([1]))  # the model ran
    return rig


@pytest.mark.parametrize("break_it", STALE.values(), ids=STALE.keys())
def test_an_unrecorded_forward_is_followed_by_no_false_alarm(
    break_it: Callable[[ManagerRig, Any], None], monkeypatch: Any, events: Path
) -> None:
    rig = _rig_after_a_broken_decode(break_it, monkeypatch, events)
    assert rig.lengths[1] == 21
    assert rig.manager.errors.total == 1
    single = rig.manager._single_forwards[0]
    assert (single.phase, rig.manager.depth, rig.manager.armed) == (Phase.IDLE, 0, False)
    for _ in range(3):
        rig.result(rig.decode([1]))
        rig.allocator.free(torch.tensor([rig.slot(1, 2)]))  # without its hook: nothing is known
    rig.result(rig.extend(2, range(30)))
    assert rig.settle() == []
    assert [e["checking"] for e in _events(events, "checking")] == [False]


@pytest.mark.parametrize("break_it", STALE.values(), ids=STALE.keys())
def test_after_a_flush_everything_is_checked_again(
    break_it: Callable[[ManagerRig, Any], None], monkeypatch: Any, events: Path
) -> None:
    rig = _rig_after_a_broken_decode(break_it, monkeypatch, events)
    rig.result(rig.decode([1]))
    assert not rig.manager.armed
    _flush(rig)
    rig.result(rig.extend(1, range(50, 80)))
    rig.result(rig.decode([1]))
    assert rig.settle() == []
    assert rig.manager.armed
    assert rig.manager.forward_ct == int(rig.manager.state.summary[Header.FORWARD_DONE])
    assert [e["checking"] for e in _events(events, "checking")] == [False, True]
    _damage_is_found(rig, 1)


def test_findings_before_the_error_are_reported_and_those_in_flight_are_not(
    monkeypatch: Any,
) -> None:
    rig = ManagerRig()
    rig.result(rig.extend(1, range(20)))
    rig.result(rig.extend(2, range(20)))
    rig.manager.groups[0].k_head[rig.slot(1, 4), 1] ^= 1
    rig.result(rig.decode([1]))
    rig.manager.groups[0].k_head[rig.slot(2, 4), 1] ^= 1
    in_flight = rig.decode([2])
    with monkeypatch.context() as patch:
        _break_plan(rig, patch)
        rig.result(rig.decode([1]))
    rig.result(in_flight)
    assert {v.reader.request_id for v in rig.settle()} == {"req-1"}
    assert rig.manager.violations.moot > 0


def test_a_forward_of_an_unknown_mode_is_served_and_said(caplog: Any) -> None:
    rig = ManagerRig()
    rig.result(rig.extend(1, range(20)))

    def make_unknown(batch: Any) -> None:
        batch.forward_mode = ForwardMode.PREBUILT

    rig.on_batch = make_unknown
    rig.result(rig.decode([1]))
    assert "cannot derive the slots of a forward in mode PREBUILT" in caplog.text
    assert "has stopped checking the target runner" in caplog.text
    assert "flush the cache" in caplog.text
    rig.on_batch = lambda batch: None
    rig.result(rig.decode([1]))
    assert rig.settle() == []


def test_an_error_during_a_capture_lasts_until_a_restart(monkeypatch: Any, caplog: Any) -> None:
    """A graph that lacks launches would never record what its replays write."""
    rig = ManagerRig()
    rig.result(rig.extend(1, range(20)))
    with monkeypatch.context() as patch, rig.manager.disarmed():
        _break_plan(rig, patch)
        rig.result(rig.decode([1]))
    assert "restart the server" in caplog.text
    _flush(rig)
    rig.result(rig.extend(1, range(20)))
    assert not rig.manager.armed
    assert int(rig.manager.state.summary[Header.ARMED]) == 0


def test_while_nothing_is_checked_captures_still_hold_the_launches() -> None:
    rig = ManagerRig()
    rig.result(rig.extend(1, range(20)))
    rig.manager.lose_track()
    launched = rig.manager.forward_ct
    rig.result(rig.decode([1]))
    assert rig.manager.forward_ct == launched
    with rig.manager.disarmed():
        rig.result(rig.decode([1]))
    assert rig.manager.forward_ct == launched + 1
    assert not rig.manager.armed


def test_all_runners_of_a_process_stop_together() -> None:
    """A draft's chains lead from the target's records."""
    first, second = ManagerRig(), ManagerRig()
    second.manager._tracking = first.manager._tracking
    second.result(second.extend(1, range(20)))
    first.manager.lose_track()
    second.result(second.decode([1]))
    assert not second.manager.armed
    _flush(second)
    second.result(second.extend(1, range(20)))
    assert second.manager.armed
    assert not first.manager.armed


def _lose_track_and_flush(rig: ManagerRig) -> torch.Tensor:
    """20 slots for a request whose KV comes from elsewhere before the first forward after the flush."""
    rig.result(rig.extend(1, range(20)))
    rig.manager.lose_track()
    _flush(rig)
    slots = rig.allocator.alloc(20)
    rig.rows.req_to_token[1, :20] = slots.int()
    rig.lengths[1] = 20
    return slots


def test_a_load_is_the_first_after_a_flush() -> None:
    """Checks resume with it. The forward that reads its slots would report them."""
    rig = ManagerRig()
    slots = _lose_track_and_flush(rig)
    assert rig.manager.note_loaded(LoadedPrefix(list(range(30, 50)), slots, 0))
    adopt_content(rig.manager.launcher, slots)
    rig.result(rig.extend(1, range(8)))
    assert rig.settle() == []
    _damage_is_found(rig, 1)


def test_an_arrival_is_the_first_after_a_flush() -> None:
    rig = ManagerRig()
    rig.manager.expect_arrivals(page_size=1)
    _lose_track_and_flush(rig)
    assert rig.manager.note_arrivals([Arrival(1, 0, range(20), 0, has_records=False)])
    rig.result(rig.decode([1]))
    assert rig.settle() == []
    _damage_is_found(rig, 1)


def test_a_load_before_the_flush_stays_without_records() -> None:
    rig = ManagerRig()
    rig.result(rig.extend(1, range(20)))
    rig.manager.lose_track()
    assert not rig.manager.note_loaded(LoadedPrefix([30], rig.allocator.alloc(1), 0))
    assert not rig.manager.armed


# What is raised all the same


@pytest.mark.parametrize("break_it", STALE.values(), ids=STALE.keys())
def test_raise_ends_the_server_with_the_error(
    break_it: Callable[[ManagerRig, Any], None], monkeypatch: Any
) -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    rig.result(rig.extend(1, range(20)))
    with monkeypatch.context() as patch:
        break_it(rig, patch)
        with pytest.raises((Broken, CanaryPhaseError, AttributeError)):
            rig.decode([1])
    assert rig.manager.errors.total == 0
    assert rig.manager._single_forwards[0].phase is Phase.IDLE


@pytest.mark.parametrize("mode", [CanaryMode.LOG, CanaryMode.RAISE])
def test_start_up_is_refused_in_both_modes(mode: CanaryMode, monkeypatch: Any) -> None:
    rig = ManagerRig(mode=mode)
    rig.manager.serving = rig.manager.errors.serving = False  # as before mark_init_finished()
    with monkeypatch.context() as patch:
        _break_plan(rig, patch)
        with pytest.raises(Broken):
            rig.extend(1, range(20))
    rig.manager.observers.append(SimpleNamespace(attach_radix_cache=_broken))
    with pytest.raises(Broken):
        rig.manager.attach_radix_cache(None)


@pytest.mark.parametrize("mode", [CanaryMode.LOG, CanaryMode.RAISE])
def test_errors_of_the_model_pass_through_untouched(mode: CanaryMode, monkeypatch: Any) -> None:
    """Also when the canary fails while it cleans up after them."""
    rig = ManagerRig(mode=mode)
    rig.extend(1, range(20))
    monkeypatch.setattr(rig.manager, "_forwards_done", _broken)
    with pytest.raises(RuntimeError, match="the model failed") as caught:
        rig.extend(2, range(10), fail=True)
    assert caught.value.__cause__ is None
    assert rig.manager.errors.total == (1 if mode is CanaryMode.LOG else 0)


# Hooks


def _batch_of(row: int = 1) -> Any:
    return SimpleNamespace(
        reqs=[RigRequest(row)],
        forward_iter=1,
        forward_mode=ForwardMode.DECODE,
    )


def test_each_hook_that_runs_while_serving_is_guarded(in_context: Any, caplog: Any) -> None:
    """BEFORE and AFTER hooks are called with nothing that they expect: in mode log none of them raises."""
    rig = in_context(ManagerRig())
    context.allocator_kinds[None] = PoolKind.FULL
    started = {"startup_check", "last_words", "memory", "server_args"}  # main process and start-up
    at_start = {"_install", "_after_pools_exist", "_attach_radix_cache", "_mark_init_finished"}
    at_start |= {"_after_scheduler_init", "_after_backends_exist"}
    at_start |= {"_after_tree", "refuse_tree"}  # of HiCache
    at_start |= {"_after_init", "start_tree", "_start_without_storage"}  # of its unified tree
    at_start |= {"_after_state_args"}  # of transfers
    at_start |= {"_after_cache"}  # of LMCache
    called = set()
    for hook in collect_hooks():
        module, name = hook.fn.__module__.rsplit(".", 1)[1], hook.fn.__name__
        calls_nothing = hook.hook_type in (HookType.BEFORE, HookType.AFTER)
        if not calls_nothing or module in started or name in at_start:
            continue
        hook.fn(*[SimpleNamespace(device="cpu")] * 4)
        called.add(module)
    shared = {"hooks"}  # of containment, which the release's `action` lists
    shared |= {"released_memory"}  # which its `weights` lists
    shared |= {"rows"}  # which its `scheduler` lists
    assert called <= {name.rpartition(".")[2] for name in release().hook_modules} | shared
    assert called >= {"allocator", "cuda_graph", "scheduler", "speculative", "schedule_stream"}
    assert rig.manager.errors.total > 5
    assert not rig.manager.armed


def test_a_step_that_cannot_be_recorded_is_served(in_context: Any, monkeypatch: Any) -> None:
    rig = in_context(ManagerRig())
    rig.result(rig.extend(1, range(20)))
    monkeypatch.setattr(rig.recorder, "begin_step", _broken)
    served = scheduler._around_run_batch(lambda *_: "result", None, _batch_of())
    assert served == "result"
    # Its result is of a step that nobody knows.
    processed = scheduler._around_process_result(lambda *_: "done", None, _batch_of(), served)
    assert processed == "done"
    assert rig.manager.errors.total == 2
    assert not rig.manager.armed


@pytest.mark.parametrize("name", ["_begin_step", "_end_step", "_result_arrived"])
def test_errors_of_the_scheduler_pass_through_the_hooks(
    name: str, in_context: Any, monkeypatch: Any
) -> None:
    in_context(ManagerRig())
    monkeypatch.setattr(scheduler, name, _broken)

    def fail(*_: Any) -> Any:
        raise RuntimeError("SGLang's own")

    around = scheduler._around_process_result, (fail, None, _batch_of(), None)
    if name != "_result_arrived":
        around = scheduler._around_run_batch, (fail, None, _batch_of())
    with pytest.raises(RuntimeError, match="SGLang's own"):
        around[0](*around[1])


def _row_is_freed(row: int) -> None:
    """As the release's hook learns it."""
    hooks = {h.target: h.fn for h in collect_hooks() if h.fn.__module__.endswith(".rows")}
    pool = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
    if (free_rows := hooks.get(f"{pool}.free_rows")) is not None:  # from 0.5.21 on
        free_rows(None, [row])
    else:
        hooks[f"{pool}.free"](None, RigRequest(row))


def test_a_row_whose_release_goes_unnoticed_raises_no_false_alarm(
    in_context: Any, monkeypatch: Any
) -> None:
    """What its forward in flight sees would be moot."""
    rig = in_context(ManagerRig())
    rig.result(rig.extend(1, range(20)))
    rig.rows.req_to_token[1, 3] = 0  # recycled while the forward runs
    step = rig.decode([1])
    monkeypatch.setattr(rig.recorder, "row_released", _broken)
    _row_is_freed(1)
    rig.result(step)
    assert rig.settle() == []
    assert rig.manager.errors.total == 1


def test_token_lists_that_cannot_be_read_cost_their_check_only(
    in_context: Any, monkeypatch: Any
) -> None:
    rig = in_context(ManagerRig())
    monkeypatch.setattr("sglang_kv_canary.wiring.model_runner.expected_tokens_of", _broken)
    batch = SimpleNamespace(forward_mode=ForwardMode.IDLE)

    def run(*_: Any) -> str:
        with rig.manager.bracket_model_forward(SimpleNamespace(forward_mode=ForwardMode.IDLE)):
            return "ran"

    assert _around_forward(run, rig, batch) == "ran"
    assert (rig.manager.errors.total, rig.manager.armed) == (1, True)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_a_step_that_decodes_looks_at_no_request(
    in_context: Any, monkeypatch: Any, mode: ForwardMode
) -> None:
    """Work for each request would grow with the batch, in each step."""
    rig = in_context(ManagerRig())
    for name in ("expected_tokens_of", "update_anchors"):
        monkeypatch.setattr(f"sglang_kv_canary.wiring.model_runner.{name}", _broken)

    def run(*_: Any) -> str:
        with rig.manager.bracket_model_forward(SimpleNamespace(forward_mode=ForwardMode.IDLE)):
            return "ran"

    assert _around_forward(run, rig, SimpleNamespace(forward_mode=mode)) == "ran"
    assert rig.manager.errors.total == 0


def test_token_lists_that_do_not_reach_the_device_raise_no_false_alarm(
    in_context: Any, monkeypatch: Any
) -> None:
    """The device is not told that the row has another owner, so it must not compare it with the one before."""
    rig = in_context(ManagerRig())
    rig.result(rig.extend(1, range(20)))
    rig.allocator.free(rig.rows.req_to_token[1, :20].long())
    rig.lengths[1] = 0
    new_owner = RigRequest(req_pool_idx=1, fill_ids=range(40, 45))
    rig.expected = lambda batch: expected_tokens_of(rig.manager, batch, [new_owner])
    with monkeypatch.context() as patch:
        patch.setattr(ExpectedTokens, "from_lists", _broken)
        rig.result(rig.extend(1, range(40, 45)))
    rig.result(rig.decode([1]))
    assert rig.settle() == []
    assert (rig.manager.errors.total, rig.manager.armed) == (1, True)
    rig.lengths[1] -= 1
    rig.result(rig.decode([1]))
    assert "ROW_LENGTH" in {reason for v in rig.settle() for reason in v.reasons}


def test_a_model_without_a_forward_batch_runs_unchecked(in_context: Any, caplog: Any) -> None:
    rig = in_context(ManagerRig())
    model = torch.nn.Module()
    model.forward = lambda value: value + 1
    wrap_model_forward(model, rig.manager)
    assert model.forward(1) == 2
    assert "called without a ForwardBatch" in caplog.text
    assert not rig.manager.armed


@pytest.mark.parametrize("extra_key", ["tenant", None])
def test_an_anchor_whose_write_failed_is_written_next_time(
    extra_key: str | None, in_context: Any, monkeypatch: Any
) -> None:
    rig = in_context(ManagerRig())
    request = RigRequest(3, extra_key="tenant")
    with monkeypatch.context() as patch:
        patch.setattr(anchors, "upload", _broken)
        with pytest.raises(Broken):
            anchors.update_anchors([rig.manager], [request])
    retried = RigRequest(3, extra_key=extra_key)
    rig.manager.state.anchors[3] = 17  # as far as the failed write may have come
    anchors.update_anchors([rig.manager], [retried])
    assert int(rig.manager.state.anchors[3]) == anchor_of(extra_key)


# Texts


def test_messages_are_one_line_without_control_characters() -> None:
    text = describe_error(ValueError("rid\n\x1b[31mforged line\u202e" + "x" * 1000))
    assert text.startswith(r"ValueError: rid\n\x1b[31mforged line\u202ex")
    assert text.isprintable()
    assert len(text) < 500
    assert describe_error(KeyError()) == "KeyError"


def test_an_error_names_the_function_that_failed() -> None:
    errors = InternalErrors(CanaryMode.LOG, SimpleNamespace(emit=lambda event: None))
    errors.serving = True
    assert errors.contain(UnsupportedForwardError("why"), HealthCheck.on_summary)
    assert errors.last == "HealthCheck.on_summary: UnsupportedForwardError: why"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
