"""DeepSeek-V3.2 on a real server, whose indexer keeps keys beside the latent rows: clean, and faults are caught."""

import sys
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.fault_cases import (
    DECODE,
    Case,
    FaultCases,
    content_cases,
    record_cases,
    tags,
)
from sglang_kv_canary.testing.mode_config import MODES, nsa_backends, why_nsa_cannot_be_served
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary_rigs.nsa_fill_ins import nsa_on_torch_native
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.volume import FULL_VOLUME, volume

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")
register_cuda_ci(est_time=300, suite="stage-b-test-1-gpu-large")

MISSING = why_nsa_cannot_be_served()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

ON_GPU = torch.cuda.is_available()
PLUGINS = () if ON_GPU else (nsa_on_torch_native,)
REQUESTS = volume(16, 150)
KINDS = ("FULL", "INDEXER")
HEAD, BOTH = tags("HEAD", "K", *KINDS), tags("HEAD TAIL", "K", *KINDS)

CASES = [
    *[c for kind in KINDS for c in content_cases(kind, "K", layers=2)],
    *[c for kind in KINDS for c in record_cases(kind, "K") if FULL_VOLUME],
    Case("other_requests_slot", "CHAIN", BOTH, DECODE),
    Case("padding_slot", "UNMAPPED_SLOT", BOTH, DECODE),
    Case("never_written_slot", "NEVER_WRITTEN", BOTH, DECODE),
    Case("free_live_slot", "USE_AFTER_FREE", BOTH, DECODE),
    Case("wrong_token", "WRITE_TOKEN", HEAD, {"mode": "EXTEND", "min_prefix": 0}),
    Case("wrong_token", "WRITE_TOKEN", HEAD, DECODE),
]

# Rows of FP8 values and their scales, which every attention kernel reads through an index
MODES["nsa_fp8"] = replace(
    MODES["nsa"],
    name="nsa_fp8",
    server_args={**MODES["nsa"].server_args, "kv_cache_dtype": "fp8_e4m3"},
    cuda_args={**MODES["nsa"].cuda_args, **nsa_backends("flashmla_kv")},
)


@long_on_newer_releases
class TestNSARaise(CanaryE2EBase):
    """SGLang's defaults: overlap scheduling, chunked prefill, radix cache, decode graphs."""

    mode_name = "nsa"
    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_TOKEN_CHECK": "all"}
    plugins: ClassVar = PLUGINS

    def test_clean(self) -> None:
        report = self.serve(TrafficShape(REQUESTS, seed=8))
        assert (report.requests, report.flushes) == (REQUESTS, 3)
        self.assert_no_violations()
        counters = self.settle()
        assert {*counters} == {*BOTH, *tags("SWEEP", "K", *KINDS)}
        for tag in BOTH:
            assert counters[tag]["checked"] == counters[tag]["eligible"] > 100 * REQUESTS, tag
            assert counters[tag]["written"] > 30 * REQUESTS, tag
        for tag in tags("TAIL SWEEP", "K", *KINDS):
            assert counters[tag]["content_checked"] > 1000, tag


@long_on_newer_releases
class TestNSAFaults(FaultCases):
    """Without overlap."""

    mode_name = "nsa"
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "disable_overlap_schedule": True,
    }
    plugins: ClassVar = PLUGINS

    def serve_two(self, name: str, length: int = 100, answer: int = 12) -> None:
        """The page with the damage, the first one, goes into the cache. Later ones are freed at the end."""
        super().serve_two(name, length, answer)

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_fault(self, case: Case) -> None:
        self.run_case(case, f"{case}-{CASES.index(case)}")

    @long_on_newer_releases
    def test_clean_without_overlap(self) -> None:
        report = self.serve(TrafficShape(volume(12, 50), seed=9, flushes=1, name="clean"))
        assert report.requests == volume(12, 50)
        self.assert_no_violations()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: its kernels write and read such rows")
class TestFP8Rows(TestNSARaise):
    mode_name = "nsa_fp8"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
