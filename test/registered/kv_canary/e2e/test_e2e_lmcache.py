"""LMCache fills slots during a forward: their tokens are known at once, and their bytes from the end of it."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary_rigs.lmcache_fill_ins import LOADED, lmcache_in_memory
from sglang_kv_canary_rigs.session_turns import take_turns

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-in for LMCache loads on the CPU"
)

REQUESTS = int(os.environ.get("KV_CANARY_TEST_OVERLAP_REQUESTS", "24"))
PROMPT = list(range(10, 60))  # three chunks of LMCache's, and a part of one


class TestLMCache(CanaryE2EBase):
    """First clean traffic, then faults. A flush empties SGLang's prefix cache, and not LMCache."""

    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        "enable_lmcache": True,
    }
    env: ClassVar = {
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20",
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
    }
    plugins: ClassVar = (lmcache_in_memory,)

    def loads(self) -> int:
        return self.serving.stderr.count(LOADED)

    def test_clean_requests_raise_no_alarm(self) -> None:
        report = self.serve(TrafficShape(REQUESTS, seed=43, flushes=4))
        assert report.requests == REQUESTS
        assert self.loads() > 0
        self.assert_no_violations()
        self.assert_healthy()

    def test_an_answer_over_a_loaded_prefix_is_the_same(self) -> None:
        first, loads = self.generate("computed", PROMPT, 8), self.loads()
        assert self.run(self.serving.flush())
        assert self.generate("loaded", PROMPT, 8) == first
        assert self.loads() == loads + 1
        self.assert_no_violations()

    @pytest.mark.parametrize("half", ["K", "V"])
    def test_damage_of_loaded_bytes_is_found_when_they_are_read_again(self, half: str) -> None:
        prompt = [7, *PROMPT] if half == "K" else [8, *PROMPT]
        self.generate(f"computed-{half}", prompt, 8)
        assert self.run(self.serving.flush())
        self.generate(f"loaded-{half}", prompt, 8)
        fault = self.inject("flip_bytes", half=half, source=1, position=20, mode="DECODE")
        self.generate(f"again-{half}", prompt, 8)
        done = fault.answer()
        event = self.assert_violation("CONTENT", f"TAIL_{half}_FULL", slot=done["slots"][0])
        assert event["writer"]["mode"] == "LOADED"
        self.assert_all_explained(done)


class TestSessions(CanaryE2EBase):
    flags: ClassVar = {
        "kv_canary": "log",
        "enable_lmcache": True,
        "enable_streaming_session": True,
    }
    plugins: ClassVar = (lmcache_in_memory,)

    def test_a_session_wraps_the_tree(self) -> None:
        """A hit of its own has a node that is not the tree's."""
        take_turns(self.serving, "session", PROMPT)
        self.generate("loaded", PROMPT, 4)
        self.assert_no_violations()
        assert self.serving.events("internal_error") == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
