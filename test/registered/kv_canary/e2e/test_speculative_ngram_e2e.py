"""NGRAM on a real server: clean under trees and chains of a trie, and faults in the target's pool are caught."""

import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.fault_cases import Case, tags
from sglang_kv_canary_rigs.ngram_serving import NgramE2EBase
from sglang_kv_canary_rigs.on_releases import from_0_5_22
from sglang_kv_canary_rigs.session_turns import ANSWER, take_turns
from sglang_kv_canary_rigs.spec_fault_cases import EVERYWHERE, VERIFY, EagleFaults, damages, flips

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")
register_cuda_ci(est_time=150, suite="stage-b-test-1-gpu-small")

PROMPT = list(range(100, 140))
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


class TestNgramSessions(NgramE2EBase):
    """No injection. SGLang counts the last token of a turn as computed, and its slot holds a rejected draft."""

    speculation: ClassVar = {"enable_streaming_session": True, "kv_canary": "log"}

    @from_0_5_22
    def test_fault_of_sglang_itself_is_reported(self) -> None:
        self.expect_violations()
        take_turns(self.serving, "session", PROMPT, turns=1)
        self.assert_no_violations()
        take_turns(self.serving, "other", PROMPT[::-1], turns=2)
        event = self.assert_violation("TOKEN", "HEAD_K_FULL", reader="other.1", writer="other.0")
        assert event["writer"]["mode"] == "TARGET_VERIFY"
        last = len(PROMPT) + ANSWER - 1
        assert event["stored_position"] == event["expected_position"] == last


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
