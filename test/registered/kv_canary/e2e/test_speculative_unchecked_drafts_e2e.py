"""DFLASH and multi-layer EAGLE on a real server: the draft model's KV is not checked, the target's is."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.fault_cases import Case
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.spec_fault_cases import EVERYWHERE, VERIFY, EagleFaults, flips
from sglang_kv_canary_rigs.unchecked_drafts import DflashE2EBase, LayersE2EBase

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")
register_cuda_ci(est_time=200, suite="stage-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(
    "DFLASH and multi-layer EAGLE" in {case.name for case in release().refusals()},
    reason="this release refuses them; lifted by make test SGLANG=0.5.23",
)
K, V = flips("target", VERIFY)
ROW = ("target", Case("other_requests_row", "ROW_CHAIN", ("HEAD_K_FULL",), VERIFY))
FREED = ("target", Case("free_live_slot", "USE_AFTER_FREE", EVERYWHERE, VERIFY))


class UncheckedDraftFaults(EagleFaults):
    def test_clean(self) -> None:
        self.converse("unchecked", rounds=3)
        self.assert_clean()

    def test_the_server_says_so_once(self) -> None:
        assert self.serving.stderr.count("the draft model's KV is not checked: ") == 1


class TestDflash(DflashE2EBase, UncheckedDraftFaults):
    @pytest.mark.parametrize(("role", "case"), [K, V, ROW, FREED], ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")


class TestLayers(LayersE2EBase, UncheckedDraftFaults):
    @pytest.mark.parametrize(("role", "case"), [V, FREED], ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
