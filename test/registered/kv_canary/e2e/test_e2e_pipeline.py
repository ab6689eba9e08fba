"""Pipeline parallelism: several micro-batches in flight, each stage with the layers and the pool that are its own."""

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
from sglang_kv_canary_rigs.on_releases import fewer_on_newer_releases, long_on_newer_releases
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=110, suite="stage-a-test-cpu")
register_cuda_ci(est_time=180, suite="stage-b-test-2-gpu-large")

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="needs a second GPU, or no GPU and the CPU engine"
)

STAGES = [0, 1]
ALL = {"pp_size": 2, "kv_canary_real_data": "all", "kv_canary_sweep_interval": 1}
DECODE = {"mode": "DECODE"}
ALL_TAGS = {"HEAD_K_FULL", "HEAD_V_FULL", "TAIL_K_FULL", "TAIL_V_FULL"}


BIND = bind_each_rank(2)


@long_on_newer_releases
class TestPipelineAsyncDepthClean(CanaryE2EBase):
    """One more micro-batch in flight than there are stages; running requests are retracted."""

    flags: ClassVar = {
        **ALL,
        "kv_canary": "raise",
        "pp_async_batch_depth": 1,
        "log_level": "warning",
    }
    env: ClassVar = {
        **BIND,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "20",
    }

    def test_clean_requests_raise_no_alarm(self) -> None:
        report = self.serve(TrafficShape(volume(24, 40), seed=18, flushes=1))
        # SGLang retracts every 20 forwards, decodes only: here it has some, whatever it had above.
        rng = random.Random("retracted")
        self.generate_together([(f"retracted-{i}", random_tokens(rng, 30), 64) for i in range(4)])
        assert (report.requests, report.flushes) == (volume(24, 40), 1)
        assert self.serving.stderr.count("Testing retraction") > 0
        self.assert_no_violations()


class TestPipeline(CanaryE2EBase):
    """First clean traffic, then faults."""

    flags: ClassVar = {**ALL, "kv_canary": "log"}
    env: ClassVar = {**BIND, "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20"}

    def test_clean_requests_raise_no_alarm(self) -> None:
        report = self.serve(TrafficShape(volume(22, 80), seed=17))
        assert (report.requests, report.flushes) == (volume(22, 80), 3)
        self.assert_no_violations()
        self.assert_healthy()
        counters = self.settle()
        for tag in self.mode.tags("HEAD") + self.mode.tags("TAIL"):
            assert counters[tag]["checked"] == counters[tag]["eligible"] > 1_500, tag

    def test_both_stages_are_active(self) -> None:
        active = self.serving.events("active")
        assert sorted((e["pp_rank"], e["rank"]) for e in active) == [(0, 0), (1, 0)]
        assert len(self.serving.get("/server_info")["kv_canary_active"]) == 2

    def serve_some(self, name: str, count: int = 6) -> None:
        """Enough requests for two micro-batches with two of them each."""
        rng = random.Random(name)
        self.generate_together([(f"{name}-{i}", random_tokens(rng, 30), 24) for i in range(count)])

    def assert_only_on(self, stage: int) -> None:
        assert {e["pp_rank"] for e in self.violations()} == {stage}

    # Each stage has one of the two layers.
    @pytest.mark.parametrize("half", fewer_on_newer_releases(["K", "V"], ["V"]))
    @pytest.mark.parametrize("stage", STAGES)
    def test_damaged_bytes_are_found_on_their_stage(self, stage: int, half: str) -> None:
        injection = self.inject("flip_bytes", pp_rank=stage, half=half, source=0, **DECODE)
        self.serve_some(f"bytes{stage}{half}")
        done = injection.answer()
        self.assert_violation("CONTENT", f"TAIL_{half}_FULL", slot=done["slots"][0])
        self.assert_only_on(stage)
        self.assert_all_explained(done)

    @pytest.mark.parametrize("stage", fewer_on_newer_releases(STAGES, STAGES[:1]))
    def test_other_requests_slot(self, stage: int) -> None:
        injection = self.inject("other_requests_slot", pp_rank=stage, **DECODE)
        self.serve_some(f"row{stage}")
        done = injection.answer()
        assert self.reported_in_forwards("CHAIN") == ALL_TAGS
        self.assert_only_on(stage)
        self.assert_all_explained(done)

    @pytest.mark.parametrize("stage", STAGES)
    def test_an_input_that_was_not_sampled(self, stage: int) -> None:
        """Only the last stage samples; the other one is sent what it compares."""
        injection = self.inject("wrong_token", pp_rank=stage, **DECODE)
        self.serve_some(f"token{stage}")
        done = injection.answer()
        assert self.reported_in_forwards("WRITE_TOKEN") == {"HEAD_K_FULL", "HEAD_V_FULL"}
        self.assert_only_on(stage)
        self.assert_all_explained(done)

    @pytest.mark.parametrize("stage", fewer_on_newer_releases(STAGES, STAGES[1:]))
    def test_live_slot_freed(self, stage: int) -> None:
        injection = self.inject("free_live_slot", pp_rank=stage, **DECODE)
        self.serve_some(f"freed{stage}")
        done = injection.answer()
        assert self.reported_in_forwards("USE_AFTER_FREE") == ALL_TAGS
        self.assert_only_on(stage)
        self.assert_all_explained(done)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
