"""Prometheus metrics against the real client library, and that dashboard, alerts and docs name what exists."""

from __future__ import annotations

import json
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.monitors import health as health_module
from sglang_kv_canary.monitors import metrics as metrics_module
from sglang_kv_canary.monitors.health import HealthCheck
from sglang_kv_canary.monitors.metrics import (
    METRICS,
    PREFIX,
    MetricFamilies,
    MetricsExporter,
    metric_labels,
)
from sglang_kv_canary.monitors.violation_pairs import violation_pairs
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.reports.async_copy import FutureTensors
from sglang_kv_canary.runner.ranks import Ranks
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary_rigs.checkout import DOCS
from sglang_kv_canary_rigs.fresh_process import FreshProcesses
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

pytestmark = pytest.mark.usefixtures("sweeps_never_rest")

LABELS = {"model_name": "tiny", "tp_rank": 0, "runner": "target"}


class MeasuredRig(TreeRig):
    """A TreeRig whose manager exports to a registry of its own."""

    def __init__(self, monkeypatch: Any, labels: dict[str, Any] = LABELS, **settings: Any) -> None:
        import prometheus_client

        monkeypatch.setattr(metrics_module, "PUBLISH_EVERY_S", 0.0)
        super().__init__(**{"sweep_interval": 1, "health_check_interval": 5, **settings})
        manager = self.manager
        config, groups, sink = manager.config, manager.groups, manager.sink
        sweep = SweepOrchestrator(config, groups, sink)
        health = HealthCheck(config, groups, sink, "target", sweep)
        self.registry = prometheus_client.CollectorRegistry()
        self.labels = labels
        self.families = MetricFamilies(tuple(labels), self.registry)
        exporter = MetricsExporter(groups, labels, self.families, health, sweep)
        manager.observers += [sweep, health, exporter]
        manager.attach_radix_cache(self.tree)
        self.sweep = sweep

    def value(self, name: str, **labels: str) -> float | None:
        merged = {k: str(v) for k, v in {**self.labels, **labels}.items()}
        return self.registry.get_sample_value(PREFIX + name, merged)


def test_values_of_a_clean_run(monkeypatch: Any) -> None:
    rig = MeasuredRig(monkeypatch, mode=CanaryMode.RAISE)
    rig.serve(list(range(100, 130)), range(20))
    rig.settle()
    rig.idle(5)
    assert rig.value("active", mode="raise", content="all") == 1
    assert rig.value("healthy") == 1
    assert rig.value("health_failures_total") == 0
    assert rig.value("forwards_total") == 21
    for tag in ("HEAD_K_FULL", "HEAD_V_FULL", "TAIL_K_FULL", "TAIL_V_FULL"):
        assert rig.value("slots_checked_total", launch_tag=tag) == sum(range(30, 50))
        assert rig.value("slots_written_total", launch_tag=tag) == 50
        assert rig.value("coverage_ratio", launch_tag=tag) == 1.0
        is_reread = tag.startswith("TAIL")
        assert rig.value("content_coverage_ratio", launch_tag=tag) == (1.0 if is_reread else None)
    assert rig.value("slots_checked_total", launch_tag="SWEEP_K_FULL") > 0
    assert rig.value("content_checked_total", launch_tag="SWEEP_V_FULL") > 0
    assert rig.value("sweep_passes_total") == rig.sweep.sweep_passes > 0
    assert rig.value("sweep_seconds_total") == pytest.approx(rig.sweep.sweep_seconds)
    assert rig.value("host_seconds_total") > 0
    assert rig.value("moot_total") == rig.value("ring_overwritten_total") == 0


def test_violations_are_counted_by_reason_and_launch_tag(monkeypatch: Any) -> None:
    rig = MeasuredRig(monkeypatch)
    rig.serve(list(range(100, 130)), range(5))
    rig.idle(5)
    pair = {"reason": "CONTENT", "launch_tag": "SWEEP_V_FULL"}
    assert rig.value("violations_total", **pair) == 0
    assert rig.value("last_violation_timestamp_seconds", **pair) is None
    started = time.time()
    damaged = rig.pool.v_buffer[0][rig.cached_slots(list(range(100, 130)))[7]]
    before = damaged.clone()
    damaged += 1
    rig.idle(12)
    damaged.copy_(before)
    rig.idle(12)
    found = rig.value("violations_total", **pair)
    assert found == rig.manager.violations.by_tag_and_reason["SWEEP_V_FULL", "CONTENT"] > 0
    found_at = rig.value("last_violation_timestamp_seconds", **pair)
    assert started <= found_at <= time.time()
    rig.idle(12)  # a sweep of clean slots
    assert rig.value("last_violation_timestamp_seconds", **pair) == found_at
    assert rig.value("violations_total", reason="CONTENT", launch_tag="SWEEP_K_FULL") == 0


def test_content_coverage_is_the_share_that_its_budget_lets_through(monkeypatch: Any) -> None:
    rig = MeasuredRig(monkeypatch, content_budget_bytes=1)
    rig.serve(list(range(100, 130)), range(20))
    rig.settle()
    rig.idle(5)
    for tag in ("TAIL_K_FULL", "TAIL_V_FULL"):
        assert rig.value("coverage_ratio", launch_tag=tag) == 1.0
        assert 0 < rig.value("content_coverage_ratio", launch_tag=tag) < 0.5


def test_a_server_whose_counters_stop_is_unhealthy_at_once(monkeypatch: Any) -> None:
    """What is published comes with counters, as a rule."""
    monkeypatch.setattr(health_module, "MIN_SILENT_STEPS", 16)
    rig = MeasuredRig(monkeypatch, health_check_interval=1)
    rig.serve(list(range(100, 130)), range(5))
    rig.settle()
    rig.idle(5)
    assert (rig.value("healthy"), rig.value("health_failures_total")) == (1, 0)
    monkeypatch.setattr(FutureTensors, "ready", lambda self: False)
    rig.serve(list(range(200, 230)), range(30))
    assert (rig.value("healthy"), rig.value("health_failures_total")) == (0, 1)


def test_every_series_of_violations_exists_before_the_first_step(monkeypatch: Any) -> None:
    """All at 0, so that the first violation is an increase."""
    rig = MeasuredRig(monkeypatch)
    (family,) = (f for f in rig.registry.collect() if f.name == f"{PREFIX}violations")
    samples = {
        (s.labels["launch_tag"], s.labels["reason"]): s.value
        for s in family.samples
        if s.name.endswith("_total")
    }
    assert set(samples.values()) == {0}
    assert set(samples) == set(violation_pairs(rig.manager.groups, tuple(Side)))


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ("HEAD_K_FULL", "CONTENT"),  # no layer has run
        ("TAIL_K_FULL", "WRITE_TOKEN"),  # HEAD writes
        ("SWEEP_K_FULL", "UNMAPPED_SLOT"),  # a sweep reads no row
        ("HEAD_K_FULL", "DOUBLE_FREE"),  # the allocator finds it, at FREE_FULL
        ("HEAD_K_FULL", "SWA_EVICTED_IN_WINDOW"),
    ],
)
def test_there_is_no_series_for_what_cannot_happen(monkeypatch: Any, tag: str, reason: str) -> None:
    rig = MeasuredRig(monkeypatch)
    assert rig.value("violations_total", reason=reason, launch_tag=tag) is None
    assert rig.value("violations_total", reason="CHAIN", launch_tag=tag) == 0


def test_double_frees_have_a_series_at_the_allocators_tag(monkeypatch: Any) -> None:
    rig = MeasuredRig(monkeypatch)
    assert rig.value("violations_total", reason="DOUBLE_FREE", launch_tag="FREE_FULL") == 0
    rig.serve(list(range(100, 130)), range(5))
    slot = torch.tensor(rig.cached_slots(list(range(100, 130)))[7:8])
    for _ in range(3):
        rig.manager.ledger.record(SlotEventKind.FREE, PoolKind.FULL, slot.clone(), 1)
        rig.idle(3)
    assert rig.value("violations_total", reason="DOUBLE_FREE", launch_tag="FREE_FULL") == 2


def test_without_a_sweep_its_tags_have_no_series_of_violations(monkeypatch: Any) -> None:
    rig = MeasuredRig(monkeypatch)
    draft = {**LABELS, "runner": "draft"}
    MetricsExporter(rig.manager.groups, draft, rig.families)
    pair = {"reason": "CHAIN", "runner": "draft"}
    assert rig.value("violations_total", launch_tag="TAIL_K_FULL", **pair) == 0
    assert rig.value("violations_total", launch_tag="SWEEP_K_FULL", **pair) is None


def test_moot_findings_are_counted(monkeypatch: Any) -> None:
    rig = MeasuredRig(monkeypatch, mode=CanaryMode.RAISE)
    req = rig.admit(list(range(20)))
    rig.rows.req_to_token[rig.row(req), 3] = 0  # as if recycled while the forward runs
    step = rig.decode([rig.row(req)])
    rig.recorder.row_released(rig.row(req))
    rig.result(step)
    rig.idle(3)
    assert rig.value("moot_total") == rig.manager.violations.moot > 0


def test_stopped_kernels_show(monkeypatch: Any) -> None:
    rig = MeasuredRig(monkeypatch)
    req = rig.admit(list(range(20)))
    monkeypatch.setattr(reference, "check_and_write", lambda *args: None)
    for i in range(15):
        rig.decode_request(req, i)
    rig.idle(1)
    assert rig.value("healthy") == 0
    assert rig.value("health_failures_total") > 0


def test_target_and_draft_share_the_families(monkeypatch: Any) -> None:
    rig = MeasuredRig(monkeypatch)
    draft = MetricsExporter(rig.manager.groups, {**LABELS, "runner": "draft"}, rig.families)
    rig.manager.observers.append(draft)
    rig.serve(list(range(100, 130)), range(5))
    rig.settle()
    assert rig.value("forwards_total") == rig.value("forwards_total", runner="draft") == 6
    assert rig.value("sweep_passes_total", runner="draft") is None


def test_labels_are_those_of_sglangs_scheduler() -> None:
    server_args = SimpleNamespace(
        served_model_name="tiny", disaggregation_mode="null", extra_metric_labels={"zone": "b"}
    )
    assert metric_labels(server_args, Ranks(tp=1, pp=0, dp=None, moe_ep=0)) == {
        "model_name": "tiny",
        "engine_type": "unified",
        "tp_rank": 1,
        "pp_rank": 0,
        "moe_ep_rank": 0,
        "zone": "b",
    }
    assert metric_labels(server_args, Ranks(tp=1, pp=0, dp=3, moe_ep=0))["dp_rank"] == 3


@pytest.mark.parametrize("extra", ["zone", "pool", "reason", "mode", "outcome", "runner"])
def test_no_extra_label_takes_the_place_of_one_of_ours(extra: str, monkeypatch: Any) -> None:
    server_args = SimpleNamespace(
        served_model_name="tiny", disaggregation_mode="null", extra_metric_labels={extra: "b"}
    )
    labels = metric_labels(server_args, Ranks(tp=0, pp=0, dp=None, moe_ep=0))
    assert labels["zone" if extra == "zone" else f"exported_{extra}"] == "b"
    rig = MeasuredRig(monkeypatch, labels={**labels, "runner": "target"})
    rig.serve(list(range(100, 130)), range(5))
    rig.idle(5)
    rig.pool.v_buffer[0][rig.cached_slots(list(range(100, 130)))[7]] += 1
    rig.idle(12)
    assert rig.value("violations_total", reason="CONTENT", launch_tag="SWEEP_V_FULL") > 0
    assert rig.value("healthy") == 1
    assert rig.manager.errors.total == 0


def test_prometheus_client_is_imported_only_for_metrics() -> None:
    """It must not be imported before SGLang has set PROMETHEUS_MULTIPROC_DIR, nor needed without metrics."""
    code = "import sys, sglang_kv_canary.observers; sys.exit('prometheus_client' in sys.modules)"
    result = FreshProcesses().run(code)
    assert result.returncode == 0, result.stderr


# What is shipped for dashboards and alerts


def _names_in(text: str) -> set[str]:
    """Names that `text` has, as the canary exports them."""
    return {f"{PREFIX}{name}" for name in re.findall(r"sglang[:_]kv_canary_(\w+)", text)}


def _has_both_spellings(expression: str) -> bool:
    """Whether each name appears as often as Prometheus 3 stores it as it does as Prometheus 2 stores it."""
    return sorted(re.findall(r"sglang:(\w+)", expression)) == sorted(
        re.findall(r"sglang_(\w+)", expression)
    )


KNOWN = {metric.full_name for metric in METRICS}


def test_the_dashboard_uses_metrics_and_labels_that_exist() -> None:
    text = (DOCS / "grafana" / "kv-canary.json").read_text()
    dashboard = json.loads(text)
    assert _names_in(text) <= KNOWN
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    assert [e for e in expressions if not _names_in(e) or not _has_both_spellings(e)] == []
    assert {metric.full_name for metric in METRICS} == _names_in(" ".join(expressions))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    grouped = {
        label.strip()
        for expression in expressions
        for labels in re.findall(r"by \(([^)]*)\)", expression)
        for label in labels.split(",")
    }
    variables = [
        v["query"]["query"] for v in dashboard["templating"]["list"] if "refId" in v["query"]
    ]
    assert variables
    assert all('{__name__=~"sglang[:_]kv_canary_active"}' in variable for variable in variables)
    assert grouped <= {"model_name", "tp_rank", "runner"} | {x for m in METRICS for x in m.labels}


PER_INSTANCE = {"KVCanaryStopped"}  # what SGLang counts in its main process has no ranks


def test_the_alerts_use_metrics_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    text = (DOCS / "alerts" / "kv-canary.yml").read_text()
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} >= {"KVCanaryViolation", "KVCanaryUnhealthy"}
    for rule in rules:
        assert _names_in(rule["expr"]), rule["alert"]
        assert _names_in(rule["expr"]) <= KNOWN, rule["alert"]
        assert _has_both_spellings(rule["expr"]), rule["alert"]
        keeps_labels = " by (" not in rule["expr"] or rule["alert"] in PER_INSTANCE
        assert keeps_labels, f"{rule['alert']} loses instance, dp_rank or pp_rank"
        assert rule["annotations"]["summary"]


def test_every_metric_is_documented() -> None:
    documented = _names_in((DOCS / "metrics.md").read_text())
    assert documented == KNOWN


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
