"""SWA models on a real server: clean while the window slides and slots are reused, and every fault is caught.

The clean traffic never lets running requests share a prefix, because SGLang 0.5.12.post1 then frees slots that one of
them reads (see `family_traffic`). One test shows that the canary reports that, and that newer releases are right.
"""

import random
import sys
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.reports.classify import BugClass
from sglang_kv_canary.reports.violation import Violation, render
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.family_traffic import FamilyShape, drive_families
from sglang_kv_canary.testing.fault_cases import (
    DECODE,
    Case,
    FaultCases,
    content_cases,
    record_cases,
    tags,
    two_prompts,
)
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.on_releases import fewer_on_newer_releases, long_on_newer_releases
from sglang_kv_canary_rigs.swa_divergence_asserts import SwaDivergenceMixin
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=150, suite="stage-a-test-cpu")
register_cuda_ci(est_time=150, suite="stage-b-test-1-gpu-small")

WINDOW = consts.SWA_WINDOW
FULL, SWA = tags("HEAD TAIL", "K V", "FULL"), tags("HEAD TAIL", "K V", "SWA")
HEAD, TAIL = tags("HEAD", "K V", "FULL", "SWA"), tags("TAIL", "K V", "FULL", "SWA")
EXTEND = {"mode": "EXTEND", "min_prefix": 0}

IS_NEWER = release().has_own_canary
MARGIN = 0 if IS_NEWER else 1  # slots that SGLang's own eviction keeps beside the window

RECORDS = record_cases("SWA", "K V")
CASES = [
    *content_cases("FULL", "K V", layers=2),
    *content_cases("SWA", "K V", layers=2),
    Case("write_outside_plan", "CONTENT", TAIL, DECODE),
    Case("other_requests_slot", "CHAIN", FULL + SWA, DECODE),
    Case("other_requests_row", "ROW_CHAIN", ("HEAD_K_FULL", "HEAD_K_SWA"), DECODE),
    Case("swap_entries", "POSITION", FULL + SWA, DECODE),
    Case("padding_slot", "UNMAPPED_SLOT", FULL + SWA, DECODE),
    Case("never_written_slot", "NEVER_WRITTEN", FULL, DECODE),
    Case("slot_out_of_range", "SLOT_OUT_OF_RANGE", HEAD, DECODE),
    Case("free_live_slot", "USE_AFTER_FREE", FULL, DECODE),
    Case("free_live_slot", "USE_AFTER_FREE", SWA, {**DECODE, "kind": "SWA"}),
    Case("allocate_live_slot", "UNWRITTEN_SINCE_ALLOC", SWA, {**DECODE, "kind": "SWA"}),
    Case("double_free", "DOUBLE_FREE", ("FREE_SWA",), {"kind": "SWA"}),
    Case("wrong_token", "WRITE_TOKEN", HEAD, EXTEND),
    Case("wrong_token", "WRITE_TOKEN", HEAD, DECODE),
    Case("wrong_position", "WRITE_POSITION", HEAD, DECODE),
    Case("stale_location", "WRITE_LOCATION", tags("HEAD", "K V", "SWA"), EXTEND),
    Case("stale_mapping", "POSITION", SWA, DECODE),
    Case("shared_swa_slot", "CHAIN", SWA, DECODE),
    Case("evicted_in_window", "SWA_EVICTED_IN_WINDOW", SWA, DECODE),
    *fewer_on_newer_releases(RECORDS, RECORDS[::6]),
]


class TestSWARaise(SwaDivergenceMixin, CanaryE2EBase):
    """SGLang's defaults: overlap scheduling, chunked prefill, radix cache."""

    mode_name = "swa"
    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }
    env: ClassVar = {
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
        "SGLANG_KV_CANARY_SWA_DIVERGENCE_STATS_INTERVAL": "20",
    }

    def test_clean_while_the_window_slides_and_slots_are_reused(self) -> None:
        shape = FamilyShape(volume(48, 336), seed=3, abort_share=0.1)
        report = self.run(drive_families(self.serving, shape))
        assert (report.requests, report.flushes) == (shape.requests, shape.rounds)
        assert report.aborts > 3
        sent = report.requests
        self.assert_no_violations()
        counters = self.settle()
        assert {*counters} == {*FULL, *SWA, *tags("SWEEP", "K V", "FULL", "SWA")}
        for tag in FULL + SWA:
            assert counters[tag]["checked"] == counters[tag]["eligible"] > 150 * sent, tag
            assert counters[tag]["written"] > 60 * sent > 2 * 1024, "SWA slots were used again"
        for tag in SWA:
            assert counters[tag]["out_of_window"] > 300 * sent, tag
            assert counters[tag]["idx_divergence"] > 150 * sent, tag
        self.assert_swa_divergence_observed()


class TestSWAFaults(FaultCases):
    """Without overlap, where eviction comes as close to the window as it ever does."""

    mode_name = "swa"
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "disable_overlap_schedule": True,
    }

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_fault(self, case: Case) -> None:
        self.run_case(case, f"{case}-{CASES.index(case)}")

    def test_clean_without_overlap(self) -> None:
        report = self.run(
            drive_families(
                self.serving, FamilyShape(volume(12, 48), seed=4, rounds=volume(1, 2), name="clean")
            )
        )
        assert report.requests == volume(12, 48)
        self.assert_no_violations()

    # The window's bounds

    @pytest.mark.parametrize(("beyond", "caught"), [(0, True), (1, False)])
    def test_eviction_is_reported_in_the_window_only(self, beyond: int, caught: bool) -> None:
        """At prefix p, position p - W is the first that the forward reads; the one before it is none of its own."""
        prefix = 30 + 2 * WINDOW
        args = {"min_prefix": prefix, "position": prefix - WINDOW - beyond, **DECODE}
        injection = self.inject("evicted_in_window", **args)
        self.serve_two(f"bounds-{beyond}", answer=3 * WINDOW)
        done = injection.answer()
        if caught:
            self.assert_reported_at("SWA_EVICTED_IN_WINDOW", SWA)
            assert {e["expected_position"] for e in self.violations()} == {prefix - WINDOW}
            self.assert_all_explained(done)
        else:
            self.assert_no_violations()

    @pytest.mark.parametrize(("slots", "caught"), [(MARGIN, False), (MARGIN + 1, True)])
    def test_sglang_evicting_too_early(self, slots: int, caught: bool) -> None:
        """Without its margin it is still right, with one slot less it is not."""
        self.inject("early_eviction", slots=slots).answer()
        try:
            self.serve_two(f"early-{slots}", answer=3 * WINDOW)
        finally:
            self.inject("early_eviction", slots=-slots).answer()
        if caught:
            self.assert_reported_at("SWA_EVICTED_IN_WINDOW", SWA)
            self.assert_guessed("early_eviction")
        else:
            self.assert_no_violations()

    def test_window_cannot_lose_more_than_it_has(self) -> None:
        with pytest.raises(RuntimeError, match=r"the window has \d+ tokens and cannot lose 1000"):
            self.inject("early_eviction", slots=1000).answer()
        self.serve_two("window")
        self.assert_no_violations()

    @pytest.mark.parametrize("fault", ["double_free", "allocate_live_slot"])
    def test_fault_in_no_pool_in_particular_changes_nothing(self, fault: str) -> None:
        injection = self.inject(fault)
        self.serve_two(f"no-pool-{fault}")
        with pytest.raises(RuntimeError, match="name one with 'kind'"):
            injection.answer()
        self.assert_no_violations()

    # Slots that change hands

    def test_a_full_slot_that_is_freed_inside_the_window(self) -> None:
        """SGLang frees its SWA slot, too: that is no eviction."""
        injection = self.inject("free_live_slot", position=25, **DECODE)
        self.serve_two("freed-in-window")
        done = injection.answer()
        self.assert_reported_at("USE_AFTER_FREE", FULL)
        self.assert_reported_at("SWA_EVICTED_IN_WINDOW", SWA)
        self.assert_all_explained(done)
        guesses = [event["guess"] for event in self.guesses()]
        assert {guess["class"] for guess in guesses} == {BugClass.USE_AFTER_FREE.value}
        assert any("it follows from cause #" in guess["reason"] for guess in guesses)

    def test_freed_swa_slot_goes_to_another_request(self) -> None:
        """The mapping stays: two full slots share a SWA slot, as with a tombstone that was freed twice."""
        which = {"kind": "SWA", "position": 38, "hand_out_next": True, **DECODE}
        injection = self.inject("free_live_slot", rid="victim", **which)
        self.serve_heir_and_victim(*two_prompts("swa", 40))
        slot = injection.answer()["slots"][0]
        event = self.assert_violation("CHAIN", slot=slot, reader="victim", writer="heir")
        assert event["tag"] in SWA
        self.assert_guessed("free_live_slot", BugClass.ALIASING, BugClass.SWA_MAPPING)

    def test_fault_of_sglang_itself_is_reported(self) -> None:
        """No injection. SGLang 0.5.12.post1 frees full slots of a prefix that a running request has locked and reads.

        The cached prefix loses the SWA slots of its first 64 tokens; `reader` matches all of it, and `usurper`, whose
        prompt ends among those 64, computes them anew and has its own slots put into the tree instead.
        """
        if not IS_NEWER:
            self.expect_violations()
        rng = random.Random("own fault")
        firsts = rng.sample(range(consts.FIRST_TOKEN, consts.VOCAB_SIZE), 6)
        prompts = [[first, *random_tokens(rng, 199)] for first in firsts]
        shared = prompts[0]
        for number, prompt in enumerate([*prompts[:5], prompts[5][:64]]):
            self.generate(f"filler-{number}", prompt, 1)
        self.assert_no_violations()

        reader = ("reader", shared + random_tokens(rng, 10), 60)
        usurper = ("usurper", shared[:40] + random_tokens(rng, 8), 2)
        self.generate_together([reader, usurper])
        if IS_NEWER:
            self.assert_no_violations()
            return
        event = self.assert_violation("USE_AFTER_FREE", "HEAD_K_FULL", reader="reader")
        assert event["writer"]["request_id"] == "filler-0"
        assert event["freed"] is not None
        assert {e["reader"]["request_id"] for e in self.violations()} == {"reader"}
        assert all(e["expected_position"] <= 40 for e in self.violations())
        # What SWARadixCache does is a use after free; later the slots are stored to again.
        self.assert_guessed("free_live_slot")


class TestSWASweep(CanaryE2EBase):
    """The sweep goes through the mapping, and spares SWA slots that a cached prefix has given back."""

    mode_name = "swa"
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }
    ANSWER = 3 * WINDOW  # so long that the prefix keeps its full slots only

    def test_slots_that_a_prefix_has_given_back_are_not_swept(self) -> None:
        prompt = random_tokens(random.Random("sweep"), 48)
        answer = self.generate("slid", prompt, self.ANSWER)
        self.inject("scramble_free_slots", kind="SWA").answer()
        self.wait_for_passes(3)
        self.assert_no_violations()
        before = self.settle()
        self.wait_for_passes(3)
        swept = self.swept_since(before)
        assert 0 < swept["SWA"] < swept["FULL"]
        # The same server finds a byte of a slot that the prefix still has.
        held = [*prompt, *answer[:-1]]
        where = {"cached": held, "position": len(held) - 4}
        self.inject("flip_bytes", kind="SWA", half="V", **where).answer()
        found = self.assert_violation("CONTENT", "SWEEP_V_SWA")
        assert len(held) - 4 in (found["expected_position"], found["stored_position"])

    def swept_since(self, before: dict[str, Any]) -> dict[str, int]:
        now = self.settle()
        return {
            kind: now[f"SWEEP_K_{kind}"]["checked"] - before[f"SWEEP_K_{kind}"]["checked"]
            for kind in ("FULL", "SWA")
        }

    def wait_for_passes(self, count: int) -> None:
        """One launch a pass for each pool kind: the tree is one chunk, or a small one."""
        launches = self.settle()["SWEEP_K_SWA"]["launches"]
        self.serving.wait_for(
            lambda: self.settle()["SWEEP_K_SWA"]["launches"] >= launches + count,
            "the sweep goes on",
        )


@long_on_newer_releases
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the tests above run Triton attention on a GPU"
)
class TestSWATritonAttention(FaultCases):
    """The backend that translates slots by itself, interpreted: its layers store and read where the canary looks."""

    mode_name = "swa"
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "attention_backend": "triton",
    }
    env: ClassVar = {"SGLANG_KV_CANARY_TOKEN_CHECK": "all", **INTERPRETED}
    plugins: ClassVar = (quick_interpreter,)

    def test_clean(self) -> None:
        prompt = random_tokens(random.Random("triton"), 44)
        for number, length in enumerate((44, 44, 32)):
            self.generate(f"triton-{number}", [*prompt[:length], number, 7], 3)
        self.assert_no_violations()
        counters = self.settle()
        assert counters["TAIL_V_SWA"]["content_checked"] > 150
        assert counters["TAIL_V_SWA"]["out_of_window"] > 50

    def test_stale_mapping(self) -> None:
        injection = self.inject("stale_mapping", **DECODE)
        self.serve_two("triton-stale", answer=6)
        done = injection.answer()
        self.assert_reported_at("POSITION", SWA)
        self.assert_all_explained(done)

    def test_stale_location_of_a_decode(self) -> None:
        """The layers store the token's K and V in a free slot; no slot that anybody reads is hit."""
        injection = self.inject("stale_location", min_prefix=32, **DECODE)
        self.serve_two("triton-location", answer=8)
        full_slot, stale = injection.answer()["slots"]
        found = self.violations()
        assert {e["tag"] for e in found} == {*tags("HEAD", "K V", "SWA")}
        assert len(found) == 2, "in the one forward that was hit, and never again"
        for event in found:
            assert event["reasons"] == ["WRITE_LOCATION"]
            assert (event["full_slot"], event["attention_slot"]) == (full_slot, stale)
            assert event["slot"] not in (None, 0, stale)
            assert f"attention stores to {stale}" in render(Violation.from_event(event))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
