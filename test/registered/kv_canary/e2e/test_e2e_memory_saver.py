"""KV memory that is given back and taken again: its bytes are lost, its addresses stay, its slots are all free.

Without a GPU SGLang's memory saver is a stand-in that keeps the bytes, so the test overwrites them.
"""

from __future__ import annotations

import random
import sys
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")
register_cuda_ci(est_time=90, suite="stage-b-test-1-gpu-small")

CUDA = torch.cuda.is_available()
if CUDA:
    pytest.importorskip("torch_memory_saver", reason="SGLang's memory saver needs it on a GPU")
SAVER: dict[str, Any] = {"enable_memory_saver": True} if CUDA else {}


class TestMemorySaver(CanaryE2EBase):
    """First faults, while nobody else has written the slots that are released; then clean traffic."""

    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        **SAVER,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20"}

    def release_and_resume(self, tags: list[str] | None) -> None:
        body = {"tags": tags}
        self.settle()  # SGLang ends a server that is not idle when it is to release
        self.serving.post("/release_memory_occupation", body)
        if not CUDA:
            lost = self.inject("scramble_free_slots").answer()["slots"]
            assert len(lost) >= consts.MHA_POOL_SLOTS, "the flush has freed every slot"
        self.serving.post("/resume_memory_occupation", body)

    def test_a_slot_from_before_the_release_is_use_after_free(self) -> None:
        self.generate("before", random_tokens(random.Random("before"), 40), 4)
        self.release_and_resume(["kv_cache"])
        injection = self.inject("freed_slot", mode="DECODE")
        self.generate("after", random_tokens(random.Random("after"), 30), 12)
        done = injection.answer()
        event = self.assert_violation("USE_AFTER_FREE", "HEAD_K_FULL", reader="after")
        assert event["writer"]["request_id"] == "before"
        self.assert_all_explained(done)

    def test_content_is_read_where_it_was(self) -> None:
        self.release_and_resume(["kv_cache"])
        prompt = random_tokens(random.Random("content"), 40)
        self.generate("writer", prompt, 1)
        done = self.inject("flip_bytes", cached=prompt, position=20, half="V", source=1).answer()
        self.generate("reader", prompt, 2)
        self.assert_violation("CONTENT", "TAIL_V_FULL", reader="reader", slot=done["slots"][0])
        self.assert_all_explained(done)

    @pytest.mark.parametrize("tags", [None, ["kv_cache"]], ids=["everything", "kv_cache"])
    def test_released_and_resumed_between_requests(self, tags: list[str] | None) -> None:
        for turn in range(3):
            shape = TrafficShape(20, seed=31, flushes=0, abort_share=0.0, name=f"{tags}{turn}-")
            self.serve(shape)
            self.release_and_resume(tags)
        self.serve(TrafficShape(20, seed=31, flushes=0, abort_share=0.0, name=f"{tags}last-"))
        self.assert_no_violations()
        self.assert_healthy()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
