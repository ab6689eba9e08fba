"""Servers with unified memory: clean while pages of both sub-pools move, and damage is found in pages that have moved.

On a CPU, SGLang's Triton attention runs interpreted. With KV_CANARY_TEST_FULL_VOLUME=1, or on a GPU: all of it.
"""

import sys
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.family_traffic import FamilyShape, drive_families
from sglang_kv_canary.testing.fault_cases import DECODE, Case, FaultCases, content_cases, tags
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.pool_fixtures import one_rank
from sglang_kv_canary_rigs.volume import FULL_VOLUME, volume

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")
register_cuda_ci(est_time=120, suite="stage-b-test-1-gpu-small")

if not release().allocator_parts:
    reason = (
        "the canary covers no unified memory on this release; lifted by make test SGLANG=0.5.23"
    )
    pytest.skip(reason, allow_module_level=True)

from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang_kv_canary_rigs.unified_rig import make_unified_pool  # noqa: E402
from sglang_kv_canary_rigs.unified_serving import (  # noqa: E402
    RAISE,
    SLOTS_VARIABLE,
    UnifiedMemory,
    budget_and_buffer,
)

LONG = pytest.mark.skipif(
    not FULL_VOLUME, reason="takes long on a CPU; lifted by KV_CANARY_TEST_FULL_VOLUME=1"
)
FULL, SWA = tags("HEAD TAIL", "K V", "FULL"), tags("HEAD TAIL", "K V", "SWA")


@LONG
class TestUnifiedSwaRaise(UnifiedMemory, CanaryE2EBase):
    """SGLang's defaults: overlap scheduling, chunked prefill, prefix cache, lazy compaction; on a GPU CUDA graphs."""

    flags: ClassVar = RAISE
    # Twelve requests at once would wait for each other without end in fewer.
    env: ClassVar = {**UnifiedMemory.env, SLOTS_VARIABLE: "3000"}

    def test_clean_while_pages_move(self) -> None:
        shape = FamilyShape(volume(60, 336), seed=3)
        report = self.run(drive_families(self.serving, shape))
        assert report.requests == shape.requests
        self.assert_no_violations()
        counters = self.settle()
        assert {*counters} == {*FULL, *SWA, *tags("SWEEP", "K V", "FULL", "SWA")}
        for tag in FULL + SWA:
            assert counters[tag]["checked"] == counters[tag]["eligible"] > 150 * shape.requests, tag
        for tag in tags("TAIL SWEEP", "K V", "FULL", "SWA"):
            assert counters[tag]["content_checked"] > 20 * shape.requests, tag
        self.assert_moved(20, "full", "swa")
        assert self.serving.events("internal_error") == []

    def test_clean_with_equal_prompts_at_once(self) -> None:
        """The prefix cache frees what all but one have computed, while their next forward runs."""
        for number in range(volume(4, 40)):
            prompt = [7 + number, *range(100, 170)]
            self.generate_together([(f"equal-{number}-{i}", prompt, 8) for i in range(6)])
        self.assert_no_violations()
        assert self.serving.events("internal_error") == []


class TestUnifiedSwaFaults(UnifiedMemory, FaultCases):
    CASES: ClassVar = [
        *content_cases("FULL", "K V", layers=1),
        *content_cases("SWA", "K V", layers=1),
        Case("free_live_slot", "USE_AFTER_FREE", FULL + SWA, DECODE),
        Case("other_requests_slot", "CHAIN", FULL + SWA, DECODE),
    ]

    def test_clean(self) -> None:
        self.run(drive_families(self.serving, FamilyShape(volume(16, 48), seed=4, rounds=1)))
        self.assert_no_violations()
        self.assert_moved(1, "full", "swa")

    def test_records_are_paid_from_the_budget(self) -> None:
        budget, buffer = budget_and_buffer(self.serving)
        (active,) = self.serving.events("active")
        assert 0.98 * budget < buffer + active["record_bytes"] <= budget

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_fault(self, case: Case) -> None:
        self.run_case(case, f"{case}-{self.CASES.index(case)}")


@LONG
class TestUnifiedHybridRaise(UnifiedMemory, CanaryE2EBase):
    """LFM2: full attention beside states, which take pages of the same buffer."""

    mode_name = "unified_hybrid"
    flags: ClassVar = RAISE

    def test_clean_while_pages_move(self) -> None:
        shape = TrafficShape(volume(60, 300), seed=8)
        report = self.serve(shape)
        assert report.requests == shape.requests
        self.assert_no_violations()
        self.assert_moved(20, "full")
        assert self.serving.events("internal_error") == []


@LONG
class TestUnifiedHybridFaults(UnifiedMemory, FaultCases):
    mode_name = "unified_hybrid"
    CASES: ClassVar = [
        *content_cases("FULL", "K V", layers=1),
        Case("free_live_slot", "USE_AFTER_FREE", FULL, DECODE),
    ]

    def test_clean(self) -> None:
        self.serve(TrafficShape(16, seed=9))
        self.assert_no_violations()

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_fault(self, case: Case) -> None:
        self.run_case(case, f"{case}-{self.CASES.index(case)}")


class _Done:
    """In the place of a CUDA event, which a CPU has not."""

    asked = 0

    def query(self) -> bool:
        self.asked += 1
        return True


def test_a_hand_out_asks_for_the_forwards_that_ran_at_the_last_free() -> None:
    load_plugins()
    with one_rank():
        allocator = make_unified_pool(device="cpu").allocator
        watch_allocator(allocator)
        slots, done = allocator.alloc(8), _Done()
        allocator.alloc(8)
        assert context.freed_under is None
        allocator.set_latest_forward_done_event(done)
        allocator.free(slots)
        assert context.freed_under is done
        asked = done.asked
        allocator.alloc(8)
    assert (context.freed_under, done.asked > asked) == (None, True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no streams; lifted by a GPU")
@pytest.mark.parametrize("watched", [True, False])
def test_pages_are_handed_out_after_the_forwards_that_ran_at_their_free(watched: bool) -> None:
    """Unwatched, SGLang fills them with zeros under such a forward."""
    load_plugins()
    with one_rank():
        real = make_unified_pool(device="cuda")
        allocator, raw = real.allocator, real.allocator.unified_buffer._raw
        if watched:
            watch_allocator(allocator)
        allocator.free(allocator.alloc(64))  # compiles
        slots = allocator.alloc(64)
        raw.fill_(7)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(1 << 30)
            read = raw.clone()
            done = torch.cuda.Event()
            done.record()
        allocator.set_latest_forward_done_event(done)
        allocator.free(slots)
        allocator.alloc(64)
        torch.cuda.synchronize()
    assert bool((read == 7).all()) is watched


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
