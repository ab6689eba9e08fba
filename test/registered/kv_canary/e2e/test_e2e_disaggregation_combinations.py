"""Features over disaggregation that are independent of each other, together. Most pairs are run by hand."""

import random
import sys
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.eagle_dp_serving import EagleDpE2EBase
from sglang_kv_canary_rigs.eagle_serving import EagleE2EBase, scripted_answer
from sglang_kv_canary_rigs.ngram_serving import NgramE2EBase
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases, refused_on_newer_releases
from sglang_kv_canary_rigs.pd_pairs import BY_HAND, FAULTS, LOG_OR_RAISE, requests
from sglang_kv_canary_rigs.pd_serving import PdServing, ServesPair, no_early_reuse, transit_faults
from sglang_kv_canary_rigs.tiny_lora import WithAdapter
from sglang_kv_canary_rigs.unchecked_drafts import (
    DflashE2EBase,
    LayersE2EBase,
    LayersInStepE2EBase,
)
from sglang_kv_canary_rigs.volume import volume

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

REQUESTS = requests(volume(10, 40))


@long_on_newer_releases
class TestEagleWithDpAttention(ServesPair, EagleDpE2EBase):
    """Each rank has a draft model of its own, whose KV arrives with the target's."""

    transport: ClassVar = PdServing
    flags: ClassVar = {
        **EagleDpE2EBase.flags,
        "kv_canary": LOG_OR_RAISE,
        "log_level": "warning",
    }
    plugins: ClassVar = (transit_faults, no_early_reuse)  # some requests are aborted

    def test_clean(self) -> None:
        self.serve_in_waves("pd", REQUESTS)
        self.assert_clean_and_all_checked()

    @FAULTS
    def test_damage_of_the_drafts_kv_in_transit(self) -> None:
        self.expect_violations()
        prompt = random_tokens(random.Random("draft"), 2 * 16 + 5)
        with self.serving.damaging("drop_layer"):
            answer = self.ask("draft", prompt)
        assert answer == scripted_answer(prompt, 6)
        self.assert_violation("CONTENT", "TAIL_V_FULL", runner="draft", reader="draft")
        assert {event["runner"] for event in self.violations()} == {"draft"}


@pytest.mark.skipif(
    not release().has_own_canary, reason="SGLang refuses LoRA with EAGLE; lifted by make test"
)
@BY_HAND
class TestEagleWithLora(WithAdapter, ServesPair, EagleE2EBase):
    """An adapter changes the target's KV. The draft model runs without it, and has the same chains."""

    flags: ClassVar = {
        **TestEagleWithDpAttention.flags,
        "enable_lora": True,
        "lora_backend": "triton" if torch.cuda.is_available() else "torch_native",
    }
    plugins: ClassVar = (transit_faults,)

    adapter: ClassVar = {"scripted": True}

    def test_clean(self) -> None:
        rng = random.Random("lora")
        prompts = [random_tokens(rng, rng.randrange(5, 60)) for _ in range(3)]
        for i in range(REQUESTS):
            prompt, count = rng.choice(prompts), rng.randrange(2, 10)
            answer = self.ask(f"clean-{i}", prompt, count, lora_path=rng.choice((None, "red")))
            assert answer == scripted_answer(prompt, count)
        self.assert_clean_and_all_checked()

    @FAULTS
    def test_damage_of_the_drafts_kv_in_transit(self) -> None:
        self.expect_violations()
        with self.serving.damaging("drop_layer"):
            self.ask("draft", random_tokens(random.Random("draft"), 37), lora_path="red")
        self.assert_violation("CONTENT", "TAIL_V_FULL", runner="draft", reader="draft")


@BY_HAND
class TestLayers(ServesPair, LayersE2EBase):
    """Multi-layer EAGLE. SGLang sends the KV of the first draft layer, which has no records."""

    flags: ClassVar = {**LayersE2EBase.flags, "kv_canary": LOG_OR_RAISE}
    plugins: ClassVar = (transit_faults,)

    def test_clean(self) -> None:
        self.converse("layers", rounds=max(2, REQUESTS // 7))
        self.assert_clean()
        assert "not checked on arrival" not in self.serving.stderr

    @FAULTS
    def test_damage_in_transit(self) -> None:
        self.expect_violations()
        prompt = random_tokens(random.Random("layers"), 37)
        with self.serving.damaging("reverse_slots"):
            self.ask("layers", prompt)
        event = self.assert_violation("POSITION", runner="target", reader="layers")
        assert event["reader"]["mode"] == "ARRIVAL"


@refused_on_newer_releases
class TestNgram(ServesPair, NgramE2EBase):
    """No draft model. The trie of the decode server learns from the tokens of its requests, not from KV."""

    flags: ClassVar = {**NgramE2EBase.flags, "kv_canary": LOG_OR_RAISE, "log_level": "warning"}
    plugins: ClassVar = (transit_faults,)

    test_clean = TestLayers.test_clean
    test_damage_in_transit = TestLayers.test_damage_in_transit


@pytest.mark.skipif(
    not release().has_own_canary, reason="SGLang cannot draft there; lifted by make test"
)
@BY_HAND
class TestDflash(ServesPair, DflashE2EBase):
    """SGLang sends the draft's KV, too, which has no records."""

    flags: ClassVar = {**DflashE2EBase.flags, "kv_canary": LOG_OR_RAISE}
    plugins: ClassVar = (transit_faults,)

    test_clean = TestLayers.test_clean
    test_damage_in_transit = TestLayers.test_damage_in_transit


@BY_HAND
class TestLayersWithDpAttention(ServesPair, LayersInStepE2EBase):
    """The same on two ranks in step, whose padded verifies read what has arrived."""

    flags: ClassVar = {
        **LayersInStepE2EBase.flags,
        "kv_canary": LOG_OR_RAISE,
        "log_level": "warning",
    }
    plugins: ClassVar = (transit_faults, no_early_reuse)  # some requests are aborted

    def test_clean(self) -> None:
        self.serve_in_waves("layers", REQUESTS)
        self.assert_no_violations()
        self.assert_healthy()
        assert "not checked on arrival" not in self.serving.stderr

    test_damage_in_transit = TestLayers.test_damage_in_transit


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
