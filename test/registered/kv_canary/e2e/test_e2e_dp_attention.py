"""DP attention: each rank serves requests of its own; to keep step, it runs idle forwards and padded batches."""

from __future__ import annotations

import random
import sys
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary_rigs.cpu_cores import bind_each_rank
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=120, suite="stage-a-test-cpu")
register_cuda_ci(est_time=180, suite="stage-b-test-2-gpu-large")

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="needs a second GPU, or no GPU and the CPU engine"
)

RANKS = [0, 1]
DECODE = {"mode": "DECODE"}


class TestDPAttention(CanaryE2EBase):
    """First clean traffic, then faults."""

    mode_name: ClassVar = "mla_dp"
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20"}

    def serve_some(self, name: str, count: int, answer: int = 24) -> None:
        """`count` requests together, dealt to the ranks in turn."""
        rng = random.Random(name)
        requests = [(f"{name}-{i}", random_tokens(rng, 30), answer) for i in range(count)]
        self.generate_together(requests)

    def test_clean_requests_raise_no_alarm(self) -> None:
        report = self.serve(TrafficShape(volume(18, 40), seed=23, flushes=2))
        assert (report.requests, report.flushes) == (volume(18, 40), 2)
        self.assert_no_violations()
        for rank in RANKS:
            counters = self.serving.send("counters", rank).answer()["counters"]
            for tag in self.mode.tags("HEAD") + self.mode.tags("TAIL"):
                assert counters[tag]["checked"] == counters[tag]["eligible"] > 500, (rank, tag)

    @pytest.mark.parametrize("requests", [1, 3], ids=["idle_beside_decode", "padded_decode"])
    def test_uneven_ranks(self, requests: int) -> None:
        """One request: the other rank idles. Three: one rank decodes two of them, and the other one pads."""
        for turn in range(3):
            self.serve_some(f"uneven{requests}-{turn}-", requests)
        self.assert_no_violations()
        self.assert_healthy()

    def test_both_ranks_are_active(self) -> None:
        active = self.serving.events("active")
        assert sorted((e["dp_rank"], e["rank"]) for e in active) == [(0, 0), (1, 1)]
        assert len(self.serving.get("/server_info")["kv_canary_active"]) == 2

    @long_on_newer_releases
    @pytest.mark.parametrize("requests", [2, 5], ids=["even", "padded"])
    @pytest.mark.parametrize("rank", RANKS)
    def test_damaged_bytes_are_found_on_their_rank(self, rank: int, requests: int) -> None:
        injection = self.inject("flip_bytes", rank, source=1, **DECODE)
        self.serve_some(f"bytes{rank}{requests}", requests)
        done = injection.answer()
        event = self.assert_violation("CONTENT", "TAIL_K_FULL", slot=done["slots"][0])
        assert event["reader"]["request_id"] in done["request_ids"]
        assert {(e["rank"], e["dp_rank"]) for e in self.violations()} == {(rank, rank)}
        self.assert_all_explained(done)

    @long_on_newer_releases
    @pytest.mark.parametrize("rank", RANKS)
    def test_other_requests_slot(self, rank: int) -> None:
        injection = self.inject("other_requests_slot", rank, **DECODE)
        # Requests come one by one under DP attention: long answers, so that two of a rank's meet.
        self.serve_some(f"row{rank}", 5, answer=100)
        done = injection.answer()
        assert self.reported_in_forwards("CHAIN") == {"HEAD_K_FULL", "TAIL_K_FULL"}
        assert {e["rank"] for e in self.violations()} == {rank}
        self.assert_all_explained(done)

    @long_on_newer_releases
    @pytest.mark.parametrize("rank", RANKS)
    def test_live_slot_freed(self, rank: int) -> None:
        injection = self.inject("free_live_slot", rank, **DECODE)
        self.serve_some(f"freed{rank}", 5)
        done = injection.answer()
        assert self.reported_in_forwards("USE_AFTER_FREE") == {"HEAD_K_FULL", "TAIL_K_FULL"}
        assert {e["rank"] for e in self.violations()} == {rank}
        self.assert_all_explained(done)


class TestReplicas(CanaryE2EBase):
    """Without DP attention: replicas of the model behind one front end."""

    flags: ClassVar = {
        "dp_size": 2,
        "nccl_port": None,  # each replica has one of its own
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }
    env: ClassVar = bind_each_rank(2)

    def test_clean_requests_raise_no_alarm_on_either(self) -> None:
        report = self.serve(TrafficShape(volume(20, 40), seed=29, flushes=0))
        assert report.requests == volume(20, 40)
        assert sorted(e["dp_rank"] for e in self.serving.events("active")) == RANKS
        assert len(self.serving.get("/server_info")["kv_canary_active"]) == 2
        self.assert_no_violations()

    def test_damage_is_found_where_it_is(self) -> None:
        """The replicas share an address, so either of them takes the fault; it says which requests it has."""
        injection = self.inject("flip_bytes", half="V", source=0, **DECODE)
        rng = random.Random("replicas")
        self.generate_together([(f"replica-{i}", random_tokens(rng, 30), 24) for i in range(4)])
        slot = injection.answer()["slots"][0]
        found = self.serving.wait_for(self.violations, "the damage was reported")
        assert {(e["reasons"][0], e["slot"]) for e in found} == {("CONTENT", slot)}
        assert len({e["dp_rank"] for e in found}) == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
