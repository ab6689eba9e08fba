"""torch.compile of the model: the compiled forward is bracketed from outside, in padded graphs too."""

from __future__ import annotations

import inspect
import os
import sys
from typing import ClassVar

import pytest
import torch

from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.fill_ins import COMPILED, compiled_on_torch_native
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary_rigs.on_releases import by_default_on_newer_releases
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")
register_cuda_ci(est_time=120, suite="stage-b-test-1-gpu-small")

REQUESTS = int(os.environ.get("KV_CANARY_TEST_COMPILE_REQUESTS", volume(20, 40)))
DECODE = {"mode": "DECODE"}
# Newer releases have one list for each phase.
SIZES = next(
    name
    for name in ("cuda_graph_bs_decode", "cuda_graph_bs")
    if name in inspect.signature(ServerArgs).parameters
)


@by_default_on_newer_releases
class TestTorchCompile(CanaryE2EBase):
    """Batches of 4 are compiled, smaller ones are padded to them, and larger ones run eagerly."""

    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        "enable_torch_compile": True,
        SIZES: [4],  # each takes up to a minute to compile
        "torch_compile_max_bs": 4,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20"}
    plugins: ClassVar = () if torch.cuda.is_available() else (compiled_on_torch_native,)

    def test_clean_requests_raise_no_alarm(self) -> None:
        compiled = self.serving.stderr.count(COMPILED)
        assert compiled > 0 or torch.cuda.is_available()
        report = self.serve(TrafficShape(REQUESTS, seed=31, flushes=2))
        assert report.requests == REQUESTS
        self.assert_no_violations()
        self.assert_healthy()
        assert self.serving.stderr.count(COMPILED) == compiled, "compiled anew while serving"

    @pytest.mark.parametrize("requests", [1, 2, 3, 4])
    def test_damaged_bytes_are_found_in_compiled_forwards(self, requests: int) -> None:
        for half in ("K", "V"):
            fault = self.inject("flip_bytes", half=half, source=0, **DECODE)
            self.generate_together(
                [(f"c{half}{requests}-{i}", list(range(10 + i, 40)), 12) for i in range(requests)]
            )
            done = fault.answer()
            self.assert_violation("CONTENT", f"TAIL_{half}_FULL", slot=done["slots"][0])
            self.assert_all_explained(done)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
