"""NGRAM on a real server: clean under trees and chains of a trie, and faults in the target's pool are caught."""

import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.fault_cases import Case, tags
from sglang_kv_canary_rigs.ngram_serving import NgramE2EBase
from sglang_kv_canary_rigs.spec_fault_cases import EVERYWHERE, VERIFY, EagleFaults, damages, flips

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")
register_cuda_ci(est_time=150, suite="stage-b-test-1-gpu-small")

NGRAM_CASES = [
    *flips("target", VERIFY),
    *damages("target", VERIFY, "chain", "CHAIN"),
    ("target", Case("write_outside_plan", "CONTENT", tags("TAIL", "K V", "FULL"), VERIFY)),
    ("target", Case("other_requests_slot", "CHAIN", EVERYWHERE, VERIFY)),
    ("target", Case("other_requests_row", "ROW_CHAIN", ("HEAD_K_FULL",), VERIFY)),
    # Not the first verify, whose token a prefill sampled
    (
        "target",
        Case(
            "wrong_token", "WRITE_TOKEN", tags("HEAD", "K V", "FULL"), {**VERIFY, "min_prefix": 13}
        ),
    ),
    ("target", Case("wrong_position", "WRITE_POSITION", tags("HEAD", "K V", "FULL"), VERIFY)),
    ("target", Case("free_live_slot", "USE_AFTER_FREE", EVERYWHERE, VERIFY)),
]


class TestNgram(NgramE2EBase, EagleFaults):
    """Trees from a trie, padded below the root.

    0.5.12.post1 frees the slots of rejected tokens, and moves none. Newer releases move accepted tokens together.
    """

    def test_clean(self) -> None:
        self.converse("ngram", rounds=3)
        self.assert_clean()

    @pytest.mark.parametrize(("role", "case"), NGRAM_CASES, ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")


class TestNgramChains(NgramE2EBase, EagleFaults):
    """One branch, so that any backend may have pages; padding hangs below the root all the same."""

    speculation: ClassVar = {"speculative_ngram_max_bfs_breadth": 1, "page_size": 4}

    def test_clean(self) -> None:
        self.converse("chains")
        self.assert_clean()

    @pytest.mark.parametrize(("role", "case"), flips("target", VERIFY)[:1], ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
