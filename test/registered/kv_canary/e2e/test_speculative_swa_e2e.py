"""EAGLE with an SWA target on a real server: clean while requests grow past the window, and every fault is caught.

The draft pool lies in the full slots, beside an SWA pool that maps them: what is evicted there is still read here.
"""

import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.eagle_mode import V1, V2
from sglang_kv_canary.testing.fault_cases import Case, tags
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.eagle_swa_serving import EagleSwaE2EBase, FrozenKvE2EBase
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.spec_fault_cases import DRAFT, VERIFY, EagleFaults, flips

register_cpu_ci(est_time=70, suite="stage-a-test-cpu")
register_cuda_ci(est_time=200, suite="stage-b-test-1-gpu-small")

on_first_release = pytest.mark.skipif(
    release().has_own_canary, reason="refused by name on newer releases, see test_seam.py"
)

PAST_WINDOW = {"mode": "TARGET_VERIFY", "min_prefix": 20}
FULL, SWA = tags("HEAD TAIL", "K V", "FULL"), tags("HEAD TAIL", "K V", "SWA")
CASES = [
    *flips("target", PAST_WINDOW, "FULL"),
    *flips("target", PAST_WINDOW, "SWA"),
    ("target", Case("other_requests_slot", "CHAIN", FULL + SWA, VERIFY)),
    ("target", Case("stale_mapping", "POSITION", SWA, PAST_WINDOW)),
    ("target", Case("shared_swa_slot", "CHAIN", SWA, PAST_WINDOW)),
    ("target", Case("evicted_in_window", "SWA_EVICTED_IN_WINDOW", SWA, PAST_WINDOW)),
    ("target", Case("free_live_slot", "USE_AFTER_FREE", SWA, {**PAST_WINDOW, "kind": "SWA"})),
    ("draft", Case("other_requests_slot", "CHAIN", FULL, {"mode": "DRAFT_EXTEND_V2"})),
    *flips("draft", {**DRAFT, "min_prefix": 20}),
]
FROZEN_CASES = [
    *flips("target", PAST_WINDOW, "FULL"),
    *flips("target", PAST_WINDOW, "SWA"),
    ("target", Case("other_requests_slot", "CHAIN", FULL + SWA, VERIFY)),
    ("target", Case("free_live_slot", "USE_AFTER_FREE", FULL, PAST_WINDOW)),
]


@long_on_newer_releases
class TestEagleSwaV2(EagleSwaE2EBase, EagleFaults):
    speculation: ClassVar = V2
    # From 12 tokens on, it passes the window and, with 8 tokens to go, the prefix that PAST_WINDOW asks for.
    answer: ClassVar = 16

    def test_clean_past_the_window(self) -> None:
        self.converse("v2")
        self.assert_clean()
        counters = self.settle()
        for tag in SWA:
            assert counters[tag]["out_of_window"] > counters[tag]["checked"] / 2 > 0, tag
            assert counters[tag]["idx_divergence"] > 0, tag

    @pytest.mark.parametrize(("role", "case"), CASES, ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}-{CASES.index((role, case))}")


@on_first_release
class TestEagleSwaV1(EagleSwaE2EBase, EagleFaults):
    speculation: ClassVar = V1

    def test_clean_past_the_window(self) -> None:
        self.converse("v1")
        self.assert_clean()


class TestFrozenKv(FrozenKvE2EBase, EagleFaults):
    """The draft model reads the same slots as the target verify behind it, which finds what is wrong with them."""

    answer: ClassVar = 16

    def test_clean_past_the_window(self) -> None:
        self.converse("frozen")
        self.assert_clean()
        assert self.settle()["TAIL_K_SWA"]["out_of_window"] > 0

    @pytest.mark.parametrize(("role", "case"), FROZEN_CASES, ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}-{FROZEN_CASES.index((role, case))}")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
