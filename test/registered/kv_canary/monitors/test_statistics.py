"""Statistics: the figures are those of the forwards that ran, over exactly the steps that they name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.kernels.layout import VERIFY_BLOCK
from sglang_kv_canary.monitors.statistics import StatisticsReporter
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=12, suite="stage-a-test-cpu")

pytestmark = pytest.mark.usefixtures("sweeps_never_rest")


def _rig(interval: int, events: Path, **settings: Any) -> TreeRig:
    rig = TreeRig(event_file=str(events), sweep_interval=1, **settings)
    manager = rig.manager
    sweep = SweepOrchestrator(manager.config, manager.groups, manager.sink)
    statistics = StatisticsReporter(interval, manager.groups, manager.sink, "target", sweep)
    manager.observers += [sweep, statistics]
    manager.attach_radix_cache(rig.tree)
    return rig


def _statistics(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == "statistics"]


def test_counts_of_an_interval_are_exact(tmp_path: Path, caplog: Any) -> None:
    events = tmp_path / "events.jsonl"
    rig = _rig(10, events, mode=CanaryMode.RAISE)
    req = rig.admit(list(range(30)))
    rig.settle()
    with caplog.at_level("INFO"):
        for i in range(10):
            rig.decode_request(req, i)
        rig.settle()
    (event,) = _statistics(events)
    assert (event["from_step"], event["to_step"], event["forwards"]) == (1, 11, 10)
    for tag in ("HEAD_K_FULL", "HEAD_V_FULL", "TAIL_K_FULL", "TAIL_V_FULL"):
        assert event["checked"][tag] == sum(range(30, 40))
        assert event["written"][tag] == 10
    assert event["content_checked"]["TAIL_K_FULL"] == sum(range(30, 40))
    assert event["coverage"] == 1.0
    assert (event["violations"], event["moot"], event["overwritten"]) == (0, 0, 0)
    assert event["host_us_per_step"] > 0
    assert "kv-canary statistics, target runner, steps 1 to 11" in caplog.text


def test_no_line_before_the_interval_is_over(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = _rig(10, events)
    req = rig.admit(list(range(30)))
    rig.settle()
    for i in range(9):
        rig.decode_request(req, i)
    rig.settle()
    rig.idle(50)
    assert _statistics(events) == []


def test_a_budget_shows_as_coverage_below_one(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = _rig(20, events, verify_budget_slots=VERIFY_BLOCK)  # one block a forward
    reqs = [rig.admit([i, *range(20)]) for i in range(4)]
    rig.settle()
    for i in range(5):
        for req in reqs:
            rig.decode_request(req, i)  # one request a forward: one block, within the budget
    for i in range(20):
        rig.decode([rig.row(req) for req in reqs], [i] * 4)  # four blocks
        rig.settle()
    assert _statistics(events)[0]["coverage"] == 1.0
    assert _statistics(events)[-1]["coverage"] == pytest.approx(0.25, abs=0.1)


def test_sweeps_violations_and_overwritten_rows_are_counted(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = _rig(10, events, ring_capacity=4)
    rig.serve(list(range(100, 120)))
    req = rig.admit(list(range(30)))
    rig.manager.groups[0].k_head[rig.cached_slots(list(range(100, 120))), 3] = 0
    rig.settle()
    for i in range(10):
        rig.decode_request(req, i)
        rig.settle()
    event = _statistics(events)[-1]
    assert event["sweep_passes"] > 0
    assert event["checked"]["SWEEP_K_FULL"] > 0
    assert event["violations"] > 0
    assert event["overwritten"] > 0


def test_idle_ticks_do_not_count_as_cost_of_a_step(tmp_path: Path) -> None:
    rig = _rig(10, tmp_path / "events.jsonl")
    rig.serve(list(range(100, 120)))
    spent = rig.manager.clock.spent_ns
    assert spent > 0
    rig.idle(20)
    assert rig.manager.clock.spent_ns == spent


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
