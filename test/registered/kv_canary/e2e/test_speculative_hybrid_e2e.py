"""EAGLE with a hybrid target (LFM2) on a real server: the KV of its full-attention layers, which drafts write, too."""

import inspect
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.eagle_mode import V1
from sglang_kv_canary.testing.fault_cases import Case
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.eagle_hybrid_serving import EagleHybridE2EBase, NgramHybridE2EBase
from sglang_kv_canary_rigs.eagle_serving import DraftsWithAWholeModel
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.spec_fault_cases import (
    DRAFT,
    EVERYWHERE,
    TREES,
    VERIFY,
    EagleFaults,
    TreeFaults,
    flips,
)
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

if not release().has_own_canary:
    reason = "its fill-ins are made for newer releases; lifted by make test SGLANG=0.5.23"
    pytest.skip(reason, allow_module_level=True)
if 'device="cuda"' in inspect.getsource(MambaPool):  # up to 0.5.19
    reason = "SGLang puts states of drafts on a GPU by name; lifted by make test SGLANG=0.5.23"
    pytest.skip(reason, allow_module_level=True)

REQUESTS = volume(30, 300)
SPECULATION = [name for name in MODES["eagle"].server_args if name.startswith("speculative_")]
CASES = [
    *flips("target", VERIFY),
    *flips("draft", DRAFT)[1:],
    ("target", Case("other_requests_slot", "CHAIN", EVERYWHERE, VERIFY)),
]


class TestHybrid(EagleHybridE2EBase, EagleFaults):
    speculation: ClassVar = V1  # SGLang turns overlap off for states without a buffer of their own

    def test_clean(self) -> None:
        self.converse("hybrid")
        self.assert_clean()

    @pytest.mark.parametrize(("role", "case"), CASES, ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}-{CASES.index((role, case))}")


@long_on_newer_releases
class TestStandalone(DraftsWithAWholeModel, EagleHybridE2EBase):
    """What SGLang has for LFM2 itself: a whole model that drafts."""

    speculation: ClassVar = {**V1, "speculative_algorithm": "STANDALONE"}

    def test_clean(self) -> None:
        self.converse("standalone")
        self.assert_clean()


@long_on_newer_releases
class TestHybridAlone(EagleHybridE2EBase):
    """The same model without speculation."""

    speculation: ClassVar = dict.fromkeys(SPECULATION)
    runners: ClassVar = frozenset({"target"})

    @classmethod
    def write_draft(cls, folder: Path) -> None:
        return None

    def test_clean(self) -> None:
        report = self.serve(TrafficShape(REQUESTS, seed=6, abort_share=0.15))
        assert report.requests == REQUESTS
        self.assert_clean()

    @pytest.mark.parametrize("half", ["K", "V"])
    def test_a_flipped_byte(self, half: str) -> None:
        injection = self.inject("flip_bytes", half=half, mode="DECODE")
        self.generate_together([(f"flip-{half}", list(range(20, 40)), 12)])
        self.expect_violations()
        self.assert_violation("CONTENT", f"TAIL_{half}_FULL")
        self.assert_all_explained(injection.answer())


@long_on_newer_releases
class TestHybridRaise(EagleHybridE2EBase):
    """Prefix hits, chunked prompts, evicted states, retraction, aborts, flushes."""

    speculation: ClassVar = V1
    flags: ClassVar = {
        **EagleHybridE2EBase.flags,
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "log_level": "warning",
    }
    env: ClassVar = {
        **EagleHybridE2EBase.env,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "10",
    }

    def test_clean(self) -> None:
        report = self.serve(TrafficShape(REQUESTS, seed=5, abort_share=0.15))
        assert report.requests == REQUESTS
        assert report.aborts
        assert "Testing retraction" in self.serving.stderr
        self.assert_clean()


class TestTrees(EagleHybridE2EBase, TreeFaults):
    speculation: ClassVar = {**V1, **TREES}


@long_on_newer_releases
class TestTreesRaise(TestHybridRaise):
    speculation: ClassVar = {**V1, **TREES}


@long_on_newer_releases
class TestNgram(NgramHybridE2EBase, TreeFaults):
    """Trees of a trie."""

    @pytest.mark.parametrize(("role", "case"), flips("target", VERIFY), ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")


@long_on_newer_releases
class TestNgramRaise(NgramHybridE2EBase, TestHybridRaise):
    speculation: ClassVar = {}
    flags: ClassVar = {**TestHybridRaise.flags, **V1}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
