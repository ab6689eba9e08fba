"""A hybrid model (LFM2: convolution states and full attention) on a real server: clean, and damage is found."""

import sys
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.gdn_serving import GDN
from sglang_kv_canary_rigs.session_turns import take_turns
from sglang_kv_canary_rigs.state_faults import DAMAGE, LOST_COPY, break_states

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")
pytestmark = pytest.mark.skipif(release().states is None, reason="not checked on this release")

TAG = "STATE_K_FULL"
PROMPT = list(range(10, 60))
LONG = list(range(10, 200))  # SGLang keeps states of whole chunks of 64 tokens
needs_gdn = pytest.mark.skipif(
    not torch.cuda.is_available() or not release().has_own_canary,
    reason="its kernels need a GPU, and its configuration is that of newer releases",
)


class TestHybridRaise(CanaryE2EBase):
    """Prefix hits, chunked prompts, evicted states, retraction, aborts, flushes."""

    mode_name = "hybrid"
    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }

    def test_clean(self) -> None:
        report = self.serve(TrafficShape(60, seed=8))
        assert report.requests == 60
        assert report.aborts > 2
        (active,) = self.serving.events("active")
        assert active["states"] == {"slots": 41, "content": "all"}
        assert self.serving.events("internal_error") == []


class TestHybridSessions(CanaryE2EBase):
    mode_name = "hybrid"
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "enable_streaming_session": True,
    }

    def test_states_of_sessions_are_not_followed_and_others_are(self) -> None:
        take_turns(self.serving, "session", PROMPT)
        for rid in ("before", "after"):
            self.generate(rid, [*PROMPT, 7], 4)
        self.assert_no_violations()
        assert self.serving.events("internal_error") == []


class TestHybridFaults(CanaryE2EBase):
    mode_name = "hybrid"
    plugins: ClassVar = [break_states]

    def test_clean(self) -> None:
        self.generate("a", PROMPT, 4)
        self.generate("b", [*PROMPT, 7], 4)

    def test_damage_in_the_cache(self) -> None:
        self.expect_violations()
        self.generate("a", [*PROMPT, DAMAGE], 4)
        self.generate("b", [*PROMPT, DAMAGE, 7], 4)
        found = self.assert_violation("CONTENT", TAG, reader="b")
        read_by = "prefix hit" if release().has_own_canary else "EXTEND"
        assert (found["tier"], found["reader"]["mode"]) == ("state", read_by)

    def test_a_copy_for_the_cache_that_is_lost(self) -> None:
        """Newer releases hand out slots as they are."""
        self.expect_violations()
        self.generate("a", [*PROMPT, LOST_COPY], 4)
        self.assert_violation("CONTENT" if release().has_own_canary else "NEVER_WRITTEN", TAG)


@needs_gdn
class TestGdnRaise(CanaryE2EBase):
    """Snapshots, which SGLang takes by default where it can, with overlap scheduling and decode graphs."""

    mode_name = GDN.name
    flags: ClassVar = TestHybridRaise.flags
    strategy: ClassVar = "extra_buffer"

    def test_clean(self) -> None:
        report = self.serve(TrafficShape(120, seed=8, abort_share=0.1))
        assert report.requests == 120
        (active,) = self.serving.events("active")
        assert active["states"] == {"slots": 3 * consts.STATE_SLOTS + 1, "content": "all"}
        assert self.serving.events("internal_error") == []
        answered = self.serving.get("/server_info")
        assert answered["mamba_radix_cache_strategy"] == self.strategy


@needs_gdn
class TestGdnWithoutSnapshots(TestGdnRaise):
    flags: ClassVar = {
        **TestGdnRaise.flags,
        "mamba_radix_cache_strategy": "no_buffer",
        "disable_overlap_schedule": True,
    }
    strategy: ClassVar = "no_buffer"


@needs_gdn
class TestGdnFaults(CanaryE2EBase):
    mode_name = GDN.name
    plugins: ClassVar = [break_states]

    def test_clean(self) -> None:
        self.generate("a", LONG, 4)
        self.generate("b", [*LONG, 7], 4)

    def test_damage_in_the_cache(self) -> None:
        self.expect_violations()
        self.generate("a", [*LONG, DAMAGE], 4)
        self.generate("b", [*LONG, DAMAGE, 7], 4)
        self.assert_violation("CONTENT", TAG, reader="b")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
