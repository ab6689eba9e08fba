"""MLA models (one latent row a slot, K half only) on a real server: clean, and every fault is caught."""

import sys
from typing import ClassVar

import pytest

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
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary_rigs.on_releases import fewer_on_newer_releases
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=70, suite="stage-a-test-cpu")
register_cuda_ci(est_time=120, suite="stage-b-test-1-gpu-small")

REQUESTS = volume(70, 150)
HEAD, TAIL = tags("HEAD", "K", "FULL"), tags("TAIL", "K", "FULL")
EXTEND = {"mode": "EXTEND", "min_prefix": 0}

RECORDS = record_cases("FULL", "K")
CASES = [
    *content_cases("FULL", "K", layers=2),
    Case("write_outside_plan", "CONTENT", TAIL, DECODE),
    Case("other_requests_slot", "CHAIN", HEAD + TAIL, DECODE),
    Case("other_requests_row", "ROW_CHAIN", HEAD, DECODE),
    Case("swap_entries", "POSITION", HEAD + TAIL, DECODE),
    Case("padding_slot", "UNMAPPED_SLOT", HEAD + TAIL, DECODE),
    Case("never_written_slot", "NEVER_WRITTEN", HEAD + TAIL, DECODE),
    Case("slot_out_of_range", "SLOT_OUT_OF_RANGE", HEAD, DECODE),
    Case("free_live_slot", "USE_AFTER_FREE", HEAD + TAIL, DECODE),
    Case("allocate_live_slot", "UNWRITTEN_SINCE_ALLOC", HEAD + TAIL, DECODE),
    Case("double_free", "DOUBLE_FREE", ("FREE_FULL",)),
    Case("wrong_token", "WRITE_TOKEN", HEAD, EXTEND),
    Case("wrong_token", "WRITE_TOKEN", HEAD, DECODE),
    Case("wrong_position", "WRITE_POSITION", HEAD, DECODE),
    *fewer_on_newer_releases(RECORDS, RECORDS[::6]),
]


class TestMLARaise(CanaryE2EBase):
    """SGLang's defaults: overlap scheduling, chunked prefill, radix cache; prefixes shared by running requests."""

    mode_name = "mla"
    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_TOKEN_CHECK": "all"}

    def test_clean(self) -> None:
        report = self.serve(TrafficShape(REQUESTS, seed=8))
        assert (report.requests, report.flushes) == (REQUESTS, 3)
        assert report.aborts > 2
        self.assert_no_violations()
        counters = self.settle()
        assert {*counters} == {*HEAD, *TAIL, "SWEEP_K_FULL"}
        for tag in HEAD + TAIL:
            assert counters[tag]["checked"] == counters[tag]["eligible"] > 200 * REQUESTS, tag
        assert counters["TAIL_K_FULL"]["content_checked"] == counters["TAIL_K_FULL"]["checked"]


class TestMLAFaults(FaultCases):
    """Without overlap."""

    mode_name = "mla"
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "disable_overlap_schedule": True,
    }

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_fault(self, case: Case) -> None:
        self.run_case(case, f"{case}-{CASES.index(case)}")

    def test_clean_without_overlap(self) -> None:
        report = self.serve(TrafficShape(volume(14, 50), seed=9, flushes=1, name="clean"))
        assert report.requests == volume(14, 50)
        self.assert_no_violations()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
