"""The sweep and the metrics on a real server: damage in idle cached prefixes is found with no request."""

from __future__ import annotations

import random
import sys
import urllib.request
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=80, suite="stage-a-test-cpu")
register_cuda_ci(est_time=120, suite="stage-b-test-1-gpu-small")

_SALT = {"cache_salt": "salt"} if "cache_salt" in GenerateReqInput.__dataclass_fields__ else {}
NAMESPACES = (
    {"extra_key": "client"},
    *([_SALT, {"extra_key": "client", **_SALT}] if _SALT else ()),
)


class TestSweepAndMetrics(CanaryE2EBase):
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        "enable_metrics": True,
    }
    env: ClassVar = {
        "SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS": "20",
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20",
    }

    def scrape(self) -> dict[str, list[Any]]:
        """Samples of the canary by name, as a Prometheus server gets them."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(self.serving.url + "/metrics", timeout=30) as answer:
            text = answer.read().decode()
        samples: dict[str, list[Any]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("sglang:kv_canary_"):
                    samples.setdefault(sample.name, []).append(sample)
        return samples

    def metric(self, name: str, **labels: str) -> float:
        found = self.scrape().get(f"sglang:kv_canary_{name}", [])
        return sum(s.value for s in found if labels.items() <= s.labels.items())

    def wait_for(self, found: Callable[[], Any], what: str) -> None:
        self.serving.wait_for(found, what, poll_s=0.05)

    def wait_for_metric(self, name: str, above: float = 0, **labels: str) -> None:
        """Metrics are published about once a second."""
        self.wait_for(lambda: self.metric(name, **labels) > above, f"{name} {labels} > {above:g}")

    def test_clean_traffic_raises_no_alarm_and_is_measured(self) -> None:
        self.serve(TrafficShape(volume(30, 60), seed=3, flushes=1))
        self.assert_no_violations()
        self.wait_for_metric("forwards_total", above=20)
        # Coverage is that of what was read since the publication before, so that there must be one.
        self.generate("more", random_tokens(random.Random("more"), 30), 4)
        for tag in self.mode.tags("HEAD") + self.mode.tags("TAIL"):
            self.wait_for_metric("coverage_ratio", launch_tag=tag)
        samples = self.scrape()
        (active,) = samples["sglang:kv_canary_active"]
        assert active.value == 1
        wanted = {"mode": "log", "content": "all", "tp_rank": "0", "runner": "target"}
        assert wanted.items() <= active.labels.items()
        assert active.labels["model_name"] == self.serving.server_args["model_path"]
        self.wait_for_metric("healthy")
        for side in ("HEAD", "TAIL", "SWEEP"):
            for tag in self.mode.tags(side):
                self.wait_for_metric("slots_checked_total", launch_tag=tag)
        samples = self.scrape()
        assert all(s.value == 1.0 for s in samples["sglang:kv_canary_coverage_ratio"])
        violations = samples["sglang:kv_canary_violations_total"]
        assert {s.value for s in violations} == {0}  # each exists before it is needed
        self.wait_for_metric("sweep_passes_total")
        self.wait_for_metric("host_seconds_total")

    def test_events_of_health_statistics_and_passes(self) -> None:
        events = self.serving.events()
        kinds = {event["event"] for event in events}
        assert {"active", "health", "statistics", "sweep_pass"} <= kinds
        assert all(event["healthy"] for event in events if event["event"] == "health")
        statistics = [event for event in events if event["event"] == "statistics"]
        assert all(
            event["coverage"] == 1.0 for event in statistics if sum(event["checked"].values())
        )
        assert statistics[-1]["host_us_per_step"] > 0

    def test_an_idle_server_goes_on_sweeping(self) -> None:
        self.generate("idle", random_tokens(random.Random("idle"), 40), 2)
        self.wait_for_metric("sweep_passes_total", above=self.metric("sweep_passes_total") + 5)
        assert self.violations() == []

    @pytest.mark.parametrize("namespace", NAMESPACES, ids=str)
    def test_prefixes_of_one_client_alone_are_clean(self, namespace: dict[str, str]) -> None:
        """Their chains begin with what tells the client apart, which newer releases keep in two fields."""
        prompt = random_tokens(random.Random(str(namespace)), 40)
        params = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, **namespace}
        cached = [
            self.serving.post("/generate", body)["meta_info"]["cached_tokens"] for _ in range(2)
        ]
        assert cached[0] < cached[1]
        self.wait_for_metric("sweep_passes_total", above=self.metric("sweep_passes_total") + 2)
        self.assert_no_violations()

    @pytest.mark.parametrize(
        ("fault", "args", "reason", "tag"),
        [
            ("flip_bytes", {"half": "V", "source": 1}, "CONTENT", "SWEEP_V_FULL"),
            (
                "damage_record",
                {"what": "chain", "half": "K", "side": "HEAD"},
                "CHAIN",
                "SWEEP_K_FULL",
            ),
            (
                "damage_record",
                {"what": "position", "half": "V", "side": "TAIL"},
                "POSITION",
                "SWEEP_V_FULL",
            ),
            (
                "damage_record",
                {"what": "zero", "half": "K", "side": "TAIL"},
                "NEVER_WRITTEN",
                "SWEEP_K_FULL",
            ),
        ],
    )
    def test_damage_in_an_idle_prefix_is_found_with_no_request(
        self, fault: str, args: dict[str, Any], reason: str, tag: str
    ) -> None:
        prompt = random_tokens(random.Random(f"{fault}{reason}"), 48)
        self.generate(f"{reason}-writer", prompt, 1)
        self.assert_no_violations()
        forwards = self.serving.send("counters").answer()["forwards"]
        done = self.inject(fault, cached=prompt, position=20, **args).answer()
        found = self.assert_violation(reason, tag, slot=done["slots"][0])
        assert 20 in (found["expected_position"], found["stored_position"])
        assert found["reader"]["row"] == 0
        if found["writer"] is not None:  # a record of zeros has lost it
            assert found["writer"]["request_id"] == f"{reason}-writer"
        self.assert_all_explained(done)
        assert self.serving.send("counters").answer()["forwards"] == forwards
        self.wait_for_metric("violations_total", reason=reason, launch_tag=tag)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
