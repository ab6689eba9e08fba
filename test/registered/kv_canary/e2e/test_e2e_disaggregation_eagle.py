"""EAGLE over prefill-decode disaggregation: the draft model's KV is transferred with its records, and checked."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.eagle_mode import V2
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.scripted_models import (
    write_scripted_deepseek,
    write_scripted_eagle3,
    write_scripted_nextn,
)
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.cpu_cores import bind_each_rank
from sglang_kv_canary_rigs.eagle_serving import EagleE2EBase, scripted_answer
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.pd_pairs import FAULTS, LOG_OR_RAISE, LONG, OverAPrefixCache, requests
from sglang_kv_canary_rigs.pd_serving import (
    CachingServing,
    PdServing,
    ServesPair,
    nothing_to_synchronize,
    transit_faults,
)
from sglang_kv_canary_rigs.volume import volume

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")


class EaglePair(ServesPair, EagleE2EBase):
    flags: ClassVar = {**EagleE2EBase.flags, "log_level": "warning"}
    plugins: ClassVar = (transit_faults,)

    def found_on_arrival(self) -> dict[str, set[str]]:
        """Reasons by runner."""
        found: dict[str, set[str]] = {}
        for event in self.violations():
            assert event["reader"]["mode"].endswith("ARRIVAL"), event
            found.setdefault(event["runner"], set()).update(event["reasons"])
        return found


class TestEagle(EaglePair):
    env: ClassVar = {
        **EaglePair.env,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "8",
    }
    plugins: ClassVar = (nothing_to_synchronize, transit_faults)

    def test_clean(self) -> None:
        self.converse("pd")
        self.assert_no_violations()
        self.assert_healthy()
        counters = self.settle()
        assert all(counters[tag]["written"] for tag in self.mode.tags("TAIL"))

    def test_requests_that_resume(self) -> None:
        """SGLang keeps the KV of the target alone."""
        rng = random.Random("resumed")
        prompts = [random_tokens(rng, 12) for _ in range(2)]
        asked = [(f"resumed-{i}", prompt, 40) for i, prompt in enumerate(prompts)]
        answers = self.generate_together(asked)
        assert answers == [scripted_answer(prompt, 40) for prompt in prompts]
        assert "Testing retraction" in self.serving.stderr
        self.assert_no_violations()

    def test_damage_of_the_drafts_kv_in_transit(self) -> None:
        """The last of SGLang's buffers is the draft's V. The answer is right: drafts cost acceptance alone."""
        self.expect_violations()
        prompt = random_tokens(random.Random("draft"), 2 * 16 + 5)  # three chunks
        with self.serving.damaging("drop_layer"):
            answer = self.ask("draft", prompt)
        assert answer == scripted_answer(prompt, 6)
        self.assert_violation("CONTENT", "TAIL_V_FULL", runner="draft", reader="draft")
        assert self.found_on_arrival() == {"draft": {"CONTENT"}}


@pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_TRANSFER_REQUESTS")
class TestEagle3(EaglePair):
    """In mode raise, with longer traffic."""

    speculation: ClassVar = {**V2, "speculative_algorithm": "EAGLE3"}
    flags: ClassVar = {**EaglePair.flags, "kv_canary": "raise"}

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_eagle3(folder)

    def test_clean(self) -> None:
        self.converse("eagle3", rounds=12)
        self.assert_no_violations()
        self.assert_healthy()


@pytest.mark.skipif(
    not release().has_own_canary, reason="SGLang refuses both together; lifted by make test"
)
@long_on_newer_releases
class TestPrefixCacheOnTheDecodeServer(OverAPrefixCache, EaglePair):
    """The draft's KV of a cached prefix is not sent, either."""

    transport: ClassVar = CachingServing
    flags: ClassVar = {**EaglePair.flags, "kv_canary": LOG_OR_RAISE}

    def test_clean(self) -> None:
        self.converse("cached", rounds=max(2, requests(volume(14, 84)) // 7))
        self.assert_no_violations()
        self.assert_healthy()

    @FAULTS
    def test_damage_in_transit_behind_a_cached_prefix(self) -> None:
        super().test_damage_in_transit_behind_a_cached_prefix()
        assert self.found_on_arrival() == {"draft": {"CONTENT"}}


MODES["eagle_mla"] = replace(
    MODES["eagle"], name="eagle_mla", write_model=write_scripted_deepseek, halves=("K",)
)


class StagesToOne(PdServing):
    """The last of the prefill server's stages has the draft model."""

    prefill_flags: ClassVar = {"pp_size": 2, "disable_overlap_schedule": True}
    prefill_env: ClassVar = bind_each_rank(2)


@pytest.mark.skipif(
    not release().has_own_canary,
    reason="this release refuses it; lifted by make test SGLANG=0.5.23",
)
@long_on_newer_releases
class TestStages(EaglePair):
    """DeepSeek with its MTP layer. The draft's bytes are compared: each server has all of its layers in one rank."""

    mode_name: ClassVar = "eagle_mla"
    transport: ClassVar = StagesToOne
    flags: ClassVar = {**EaglePair.flags, "kv_canary": LOG_OR_RAISE}

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_nextn(folder)

    def test_clean(self) -> None:
        self.converse("stages", rounds=max(2, requests(14) // 7))
        self.assert_no_violations()
        self.assert_healthy()
        active = self.serving.prefill.events("active")
        stages = sorted((event["pp_rank"], event["runner"]) for event in active)
        assert stages == [(0, "target"), (1, "draft"), (1, "target")]
        assert "no records of the draft model's KV" not in self.serving.stderr
        assert "the servers differ in pipeline parallelism" in self.serving.stderr

    @FAULTS
    def test_damage_of_the_drafts_kv_in_transit(self) -> None:
        """The last of each stage's buffers: of the first stage that of the target, whose bytes are not compared."""
        self.expect_violations()
        prompt = random_tokens(random.Random("draft"), 2 * 16 + 5)  # three chunks
        with self.serving.damaging("drop_layer"):
            self.ask("draft", prompt)
        self.assert_violation("CONTENT", "TAIL_K_FULL", runner="draft", reader="draft")
        assert self.found_on_arrival() == {"draft": {"CONTENT"}}

    @FAULTS
    def test_slots_that_are_mixed_up_in_transit(self) -> None:
        self.expect_violations()
        with self.serving.damaging("reverse_slots"):
            self.ask("mixed", random_tokens(random.Random("mixed"), 2 * 16 + 5))
        on_arrival = [e for e in self.violations() if e["reader"]["mode"].endswith("ARRIVAL")]
        found = {e["runner"] for e in on_arrival if "POSITION" in e["reasons"]}
        assert found == {"target", "draft"}
        assert {e["reader"]["request_id"] for e in self.violations()} == {"mixed"}


class DecodeDrafts(PdServing):
    prefill_flags: ClassVar = {
        "speculative_algorithm": None,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "speculative_draft_model_path": None,
    }


class TestDraftOnDecodeOnly(EaglePair):
    """The draft model's slots of the prompt are never filled (sgl#17212)."""

    transport: ClassVar = DecodeDrafts

    def test_it_is_a_state_that_is_said_once(self) -> None:
        rng = random.Random("unfilled")
        for name in ("one", "other"):
            prompt = random_tokens(rng, 20)
            assert self.ask(name, prompt) == scripted_answer(prompt, 6)
        self.assert_no_violations()
        assert self.serving.stderr.count("no records of the draft model's KV") == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
