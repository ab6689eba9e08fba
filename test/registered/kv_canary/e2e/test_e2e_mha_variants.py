"""SGLang's other ways to serve an MHA pool: pages, mixed batches, two ranks. Clean runs and faults."""

import random
import sys
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=110, suite="stage-a-test-cpu")
register_cuda_ci(est_time=180, suite="stage-b-test-2-gpu-large")

LOG_ALL = {"kv_canary": "log", "kv_canary_real_data": "all"}
DECODE = {"mode": "DECODE"}
ALL_TAGS = {"HEAD_K_FULL", "HEAD_V_FULL", "TAIL_K_FULL", "TAIL_V_FULL"}


class Variant(CanaryE2EBase):
    """A clean run, then one fault in the page table and one in the bytes. Subclasses say how to serve."""

    requests: ClassVar[int] = volume(18, 60)

    def test_clean_run(self) -> None:
        report = self.serve(TrafficShape(self.requests, seed=11, flushes=1, name="clean"))
        assert (report.requests, report.flushes) == (self.requests, 1)
        self.assert_no_violations()

    def serve_two(self, name: str) -> None:
        rng = random.Random(name)
        self.generate_together([(f"{name}-{i}", random_tokens(rng, 30), 20) for i in range(2)])

    def test_damaged_bytes(self) -> None:
        injection = self.inject("flip_bytes", half="V", source=1, **DECODE)
        self.serve_two("bytes")
        done = injection.answer()
        self.assert_violation("CONTENT", "TAIL_V_FULL", slot=done["slots"][0])
        self.assert_all_explained(done)

    def test_other_requests_slot(self) -> None:
        injection = self.inject("other_requests_slot", **DECODE)
        self.serve_two("row")
        done = injection.answer()
        assert {e["tag"] for e in self.violations() if "CHAIN" in e["reasons"]} == ALL_TAGS
        self.assert_all_explained(done)

    def test_live_slot_freed(self) -> None:
        injection = self.inject("free_live_slot", **DECODE)
        self.serve_two("freed")
        done = injection.answer()
        assert {e["tag"] for e in self.violations() if "USE_AFTER_FREE" in e["reasons"]} == ALL_TAGS
        self.assert_all_explained(done)


@long_on_newer_releases
class TestPage16MixedChunk(Variant):
    flags: ClassVar = {**LOG_ALL, "page_size": consts.PAGE_SIZE, "enable_mixed_chunk": True}
    # SGLang's page allocator is a Triton kernel.
    env: ClassVar = {} if torch.cuda.is_available() else INTERPRETED
    plugins: ClassVar = () if torch.cuda.is_available() else (quick_interpreter,)

    def test_whole_page_was_freed(self) -> None:
        injection = self.inject("free_live_slot", **DECODE)
        self.serve_two("page")
        done = injection.answer()
        slots = {e["slot"] for e in self.violations() if "USE_AFTER_FREE" in e["reasons"]}
        assert len(done["slots"]) == consts.PAGE_SIZE
        assert len(slots) > 1
        assert slots <= set(done["slots"])


@long_on_newer_releases
class TestMixedChunkOverlap(Variant):
    flags: ClassVar = {**LOG_ALL, "enable_mixed_chunk": True}

    def test_mixed_batches_occur_and_are_checked(self) -> None:
        """The first prefill has all of one prompt and a chunk of the other, whose later chunks meet decodes."""
        rng = random.Random("mixed")
        injection = self.inject("flip_bytes", rid="mixed-decode", mode="MIXED")
        self.generate_together(
            [
                ("mixed-decode", random_tokens(rng, 20), 24),
                ("mixed-long", random_tokens(rng, 300), 2),
            ]
        )
        done = injection.answer()
        event = self.assert_violation("CONTENT", "TAIL_K_FULL", reader="mixed-decode")
        assert event["reader"]["mode"] == "MIXED"
        self.assert_all_explained(done)


class TestTwoRanks(CanaryE2EBase):
    flags: ClassVar = {**LOG_ALL, "tp_size": 2}
    env: ClassVar = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

    def test_clean_run(self) -> None:
        report = self.serve(TrafficShape(volume(16, 30), seed=13, flushes=1, name="clean"))
        assert (report.requests, report.flushes) == (volume(16, 30), 1)
        self.assert_no_violations()

    def test_both_ranks_are_active(self) -> None:
        assert sorted(e["rank"] for e in self.serving.events("active")) == [0, 1]
        assert len(self.serving.get("/server_info")["kv_canary_active"]) == 2

    @pytest.mark.parametrize("rank", [0, 1])
    def test_damage_on_one_rank_is_found_there_only(self, rank: int) -> None:
        prompt = random_tokens(random.Random(rank), 40)
        self.generate(f"writer{rank}", prompt, 1)
        done = self.inject("flip_bytes", rank, cached=prompt, position=20).answer()
        self.generate(f"reader{rank}", prompt, 2)
        self.assert_violation("CONTENT", "TAIL_K_FULL", slot=done["slots"][0], rank=rank)
        assert {e["rank"] for e in self.violations()} == {rank}
        self.assert_all_explained(done)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
