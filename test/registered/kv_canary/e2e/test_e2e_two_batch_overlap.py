"""Two-batch overlap: SGLang computes a batch in two halves, inside of the forward that the canary brackets."""

from __future__ import annotations

import os
import random
import sys
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.overlap_serving import OVERLAPS, Overlapping, split_batches
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")
register_cuda_ci(est_time=180, suite="stage-b-test-2-gpu-large")

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="needs a second GPU, or no GPU and the CPU engine"
)

REQUESTS = int(os.environ.get("KV_CANARY_TEST_OVERLAP_REQUESTS", volume(12, 24)))
RANKS = [0, 1]


class TestTwoBatchOverlap(Overlapping, CanaryE2EBase):
    """First clean traffic, then faults."""

    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        **OVERLAPS,
    }

    def test_clean_requests_raise_no_alarm(self) -> None:
        report = self.serve(TrafficShape(REQUESTS, seed=37, flushes=1))
        assert report.requests == REQUESTS
        self.assert_no_violations()
        self.assert_healthy()
        split = split_batches(self.serving.stderr)
        assert min(split[of] for of in ("EXTEND", "DECODE", "two chunks")) > 0

    @long_on_newer_releases
    @pytest.mark.parametrize("half", [0, 1])
    @pytest.mark.parametrize("rank", RANKS)
    def test_damaged_bytes_are_found_on_their_rank(self, rank: int, half: int) -> None:
        """Each rank decodes two short requests, and then two long ones, which are the second half of its batch."""
        least = (8, 70)[half]
        injection = self.inject("flip_bytes", rank, source=1, min_prefix=least, mode="DECODE")
        rng = random.Random(f"{rank}{half}")
        self.generate_together(
            [
                (f"half{rank}{half}-{i}", random_tokens(rng, 20 if i < 4 else 60), 24)
                for i in range(8)
            ]
        )
        done = injection.answer()
        event = self.assert_violation("CONTENT", "TAIL_K_FULL", slot=done["slots"][0])
        assert event["reader"]["request_id"] in done["request_ids"]
        assert {(e["rank"], e["dp_rank"]) for e in self.violations()} == {(rank, rank)}
        self.assert_all_explained(done)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
