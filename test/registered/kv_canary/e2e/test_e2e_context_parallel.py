"""Context parallelism: each rank computes a part of a prompt, and stores K and V of the whole of it."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.tiny_models import write_tiny_qwen3_moe
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary_rigs.context_parallel_fill_ins import (
    FLASH,
    IN_PARTS,
    IN_RUNNER,
    context_parallel_flags,
    context_parallel_on_torch_native,
)
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")
register_cuda_ci(est_time=180, suite="stage-b-test-2-gpu-large")

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="needs a second GPU, or no GPU and the CPU engine"
)

REQUESTS = int(os.environ.get("KV_CANARY_TEST_OVERLAP_REQUESTS", volume(8, 24)))
RANKS = [0, 1]
_MHA = MODES["mha"]
_FLASH_ATTENTION = {"attention_backend": "fa3"}
_TORCH_NATIVE = {"attention_backend": "torch_native", "disable_cuda_graph": True}
MODES["mha_cp"] = replace(
    _MHA,
    name="mha_cp",
    write_model=write_tiny_qwen3_moe,
    server_args={
        **_MHA.server_args,
        **context_parallel_flags(),
    },
    cuda_args={**_MHA.cuda_args, **(_FLASH_ATTENTION if FLASH else _TORCH_NATIVE)},
    env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
)


class TestContextParallel(CanaryE2EBase):
    """First clean traffic, then faults."""

    mode_name: ClassVar = "mha_cp"
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20"}
    plugins: ClassVar = () if FLASH else (context_parallel_on_torch_native,)

    def test_clean_requests_raise_no_alarm(self) -> None:
        report = self.serve(TrafficShape(REQUESTS, seed=41, flushes=1))
        assert report.requests == REQUESTS
        self.assert_no_violations()
        self.assert_healthy()
        assert IN_PARTS in self.serving.stderr or FLASH

    @pytest.mark.parametrize("computed_by", RANKS)
    @pytest.mark.parametrize("rank", RANKS)
    def test_damaged_bytes_are_found_on_their_rank(self, rank: int, computed_by: int) -> None:
        """The prompt is prefilled in two chunks. Of the first one, rank 0 computes both ends and rank 1 the middle."""
        half = ("K", "V")[computed_by]
        where = {"half": half, "source": 1, "position": (5, 32)[computed_by]}
        fault = self.inject("flip_bytes", rank, mode="EXTEND", **where)
        prompt = random_tokens(random.Random(f"{computed_by}{rank}"), 100)
        self.generate(f"part-{computed_by}{rank}", prompt, 8)
        done = fault.answer()
        self.assert_violation("CONTENT", f"TAIL_{half}_FULL", slot=done["slots"][0])
        assert {e["rank"] for e in self.violations()} == {rank}
        self.assert_all_explained(done)


@pytest.mark.skipif(
    not hasattr(envs, IN_RUNNER), reason="0.5.17 alone has both ways; lifted by SGLANG=0.5.17"
)
class TestPartsInsideTheModel(TestContextParallel):
    """The model splits a prompt, as in older releases, instead of the runner."""

    env: ClassVar = {**TestContextParallel.env, IN_RUNNER: "0"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
