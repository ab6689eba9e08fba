"""DeepSeek-V3.2 with its MTP layer on a real server: latent rows and indexer keys of target and draft.

Without a GPU the selection of tokens and the attention are filled in, see `eagle_dsa_serving.py`.
"""

import sys
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.eagle_mode import V1, V2
from sglang_kv_canary.testing.fault_cases import Case, tags
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.eagle_dsa_serving import EagleDsaE2EBase
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.spec_fault_cases import DRAFT, VERIFY, EagleFaults, flips
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="its scripted models have widths that no kernel of a GPU has"
)

on_first_release = pytest.mark.skipif(
    release().has_own_canary, reason="newer releases have v2 only, see test_seam.py"
)

KINDS = ("FULL", "INDEXER")
BOTH = tags("HEAD TAIL", "K", *KINDS)
REQUESTS = volume(30, 150)
FLIPS = [
    flips(role, mode, kind)[0]  # K: there is no V
    for role, mode in (("target", VERIFY), ("draft", DRAFT))
    for kind in KINDS
]
MORE = [
    ("target", Case("other_requests_slot", "CHAIN", BOTH, VERIFY)),
    ("draft", Case("other_requests_slot", "CHAIN", BOTH, {"mode": "DRAFT_EXTEND_V2"})),
]


class MtpFaults(EagleDsaE2EBase, EagleFaults):
    def test_clean(self) -> None:
        self.converse(type(self).__name__)
        self.assert_clean()

    @pytest.mark.parametrize(("role", "case"), FLIPS, ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}-{FLIPS.index((role, case))}")


class TestMtpV2(MtpFaults):
    speculation: ClassVar = V2

    @pytest.mark.parametrize(("role", "case"), MORE, ids=str)
    def test_other_requests_slot(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")

    def test_page_freed_under_both_pools(self) -> None:
        case = Case("free_live_slot", "USE_AFTER_FREE", BOTH, VERIFY)
        done = self.inject_and_serve("target", case, "freed")
        for role in self.runners:
            assert self.reported(role, case.reason) == {*case.tags}
        self.assert_all_explained(done)


@on_first_release
class TestMtpV1(MtpFaults):
    speculation: ClassVar = V1


@long_on_newer_releases
class TestMtpRaise(EagleDsaE2EBase):
    flags: ClassVar = {**EagleDsaE2EBase.flags, "kv_canary": "raise"}

    def test_clean(self) -> None:
        report = self.serve(TrafficShape(REQUESTS, seed=5, abort_share=0.15))
        assert (report.requests, report.flushes) == (REQUESTS, 3)
        assert report.aborts
        self.assert_clean()
        for role in self.runners:
            counters = self.serving.send("counters", role=role).answer()["counters"]
            for tag in BOTH:
                checked, eligible = counters[tag]["checked"], counters[tag]["eligible"]
                assert checked == eligible > 100 * REQUESTS, (role, tag)
        for tag in tags("TAIL SWEEP", "K", *KINDS):
            assert self.settle()[tag]["content_checked"] > 1000, tag


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
