"""Prometheus 2 and 3 scrape a real server on loopback: names, alerts and dashboard as an operator gets them."""

from __future__ import annotations

import json
import random
import re
import sys
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.monitors.metrics import METRICS, PREFIX
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary_rigs.prometheus import (
    PREFIX_IN,
    REPO,
    Prometheus,
    binaries,
    header_of_3,
    scraping,
)

register_cpu_ci(est_time=90, suite="stage-a-test-cpu")

RULES = REPO / "docs" / "alerts" / "kv-canary.yml"
DASHBOARD = REPO / "docs" / "grafana" / "kv-canary.json"
AFTER_A_VIOLATION = "last_violation_timestamp_seconds"
AFTER_AN_ERROR = "internal_errors_total"  # which does not happen here
MAJORS = tuple(PREFIX_IN)


def dashboard_queries() -> list[str]:
    """As Grafana sends them, with every variable at its widest."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries = [query.replace("$__range", "5m") for query in queries]
    return [re.sub(r"\$\w+", ".*", query) for query in queries]


class TestUnderPrometheus(CanaryE2EBase):
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        "enable_metrics": True,
    }
    servers: ClassVar[dict[int, Prometheus]]

    @classmethod
    def setup_class(cls) -> None:
        binaries()  # a skip costs no server
        super().setup_class()
        cls._stack = ExitStack()
        try:
            cls.servers = {
                major: cls._stack.enter_context(scraping(major, cls.target(), RULES))
                for major in MAJORS
            }
        except BaseException:
            cls.teardown_class()
            raise

    @classmethod
    def teardown_class(cls) -> None:
        cls._stack.close()
        super().teardown_class()

    @classmethod
    def target(cls) -> str:
        return f"127.0.0.1:{cls.serving.server_args['port']}"

    def traffic(self) -> None:
        """Traffic, and later more: coverage is that of what was read since the publication before."""
        self.serve(TrafficShape(20, seed=3, flushes=0))
        for major in MAJORS:
            self.wait_for_samples(major, "forwards_total")
        self.generate("more", random_tokens(random.Random("more"), 30), 4)

    def wait_for_samples(self, major: int, name: str, samples: int = 1) -> list[dict[str, Any]]:
        full_name = PREFIX.replace("sglang:", PREFIX_IN[major]) + name
        server = self.servers[major]
        server.wait_for(
            lambda: any(
                int(found["value"][1]) >= samples
                for found in server.query(f"count_over_time({full_name}[5m])")
            ),
            f"{samples} samples of {full_name}",
        )
        return server.query(full_name)

    def test_every_name_arrives_as_the_version_spells_it(self) -> None:
        self.traffic()
        for major in MAJORS:
            for metric in METRICS:
                if metric.name not in (AFTER_A_VIOLATION, AFTER_AN_ERROR):
                    assert self.wait_for_samples(major, metric.name), metric
            names = self.servers[major].get("label/__name__/values")
            ours = {name for name in names if "kv_canary_" in name}
            assert {name[: len("sglang:")] for name in ours} == {PREFIX_IN[major]}

    @pytest.mark.parametrize("major", MAJORS)
    def test_a_clean_server_fires_nothing(self, major: int) -> None:
        self.wait_for_samples(major, "violations_total", samples=3)
        server = self.servers[major]
        groups = server.wait_for(
            lambda: [g for g in server.get("rules")["groups"] if g["lastEvaluation"] > "0002"],
            "the rules were evaluated",
        )
        assert [rule["name"] for group in groups for rule in group["rules"]]
        assert {r["health"] for group in groups for r in group["rules"]} == {"ok"}, groups
        assert server.get("alerts")["alerts"] == []

    @pytest.mark.parametrize("major", MAJORS)
    def test_sglang_labels_the_same_rank_alike(self, major: int) -> None:
        """KVCanaryAbsent compares the two."""
        (active,) = self.wait_for_samples(major, "active")
        (running,) = self.servers[major].query(f"{PREFIX_IN[major]}num_running_reqs")
        own = {"__name__", "mode", "content", "runner"}
        labels = {k: v for k, v in active["metric"].items() if k not in own}
        assert labels.items() <= running["metric"].items()
        assert {"job", "instance", "tp_rank", "pp_rank"} <= set(labels)

    def damage(self, name: str) -> None:
        """Change a byte of a cached prefix, and wait until the sweep has reported it."""
        prompt = random_tokens(random.Random(name), 48)
        self.generate(name, prompt, 1)
        self.assert_no_violations()
        self.inject("flip_bytes", cached=prompt, position=20, half="V", source=1).answer()
        self.assert_violation("CONTENT", "SWEEP_V_FULL")

    def test_the_first_violation_fires_and_every_panel_has_data(self) -> None:
        self.damage("first")
        for major, server in self.servers.items():
            (alert,) = server.wait_for(lambda s=server: s.firing("KVCanaryViolation"), "it fires")
            wanted = {
                "reason": "CONTENT",
                "launch_tag": "SWEEP_V_FULL",
                "tp_rank": "0",
                "pp_rank": "0",
                "job": "sglang",
                "severity": "critical",
            }
            assert wanted.items() <= alert.items()
            assert alert["instance"].startswith("127.0.0.1:")
            self.wait_for_samples(major, AFTER_A_VIOLATION)
            empty = [query for query in dashboard_queries() if not server.query(query)]
            assert [query for query in empty if AFTER_AN_ERROR not in query] == []

    def test_a_violation_before_the_first_scrape_fires(self) -> None:
        self.damage("early")
        assert self.run(self.serving.flush())  # the counter stands still from here on
        self.settle()
        for major in MAJORS:
            with scraping(major, self.target(), RULES) as late:
                found = late.wait_for(lambda s=late: s.firing("KVCanaryViolation"), "it fires")
            assert [alert["launch_tag"] for alert in found] == ["SWEEP_V_FULL"]


def test_the_replayed_header_keeps_the_colon() -> None:
    """What stands in for Prometheus 3 where there is no binary of it, against the client library alone."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("sglang:kv_canary_active", "Help", registry=registry).set(1)
    server, _ = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    direct = f"127.0.0.1:{server.server_port}"
    try:
        with (
            header_of_3(direct) as replayed,
            Prometheus(binaries(2), direct, RULES) as two,
            Prometheus(binaries(2), replayed, RULES) as three,
        ):
            two.wait_for(lambda: two.query("sglang_kv_canary_active"), "the underscore arrives")
            three.wait_for(lambda: three.query("sglang:kv_canary_active"), "the colon arrives")
            assert two.query("sglang:kv_canary_active") == []
            assert three.query("sglang_kv_canary_active") == []
    finally:
        server.shutdown()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
