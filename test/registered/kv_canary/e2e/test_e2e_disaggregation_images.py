"""Images over prefill-decode disaggregation: both servers number an image alike, by its bytes."""

import random
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.eagle_mode import V1, V2
from sglang_kv_canary.testing.fill_ins import pageable_memory
from sglang_kv_canary.testing.hicache_mode import FILL_INS, SMALL_POOL
from sglang_kv_canary.testing.scripted_models import write_scripted_eagle3
from sglang_kv_canary.testing.tiny_models import TINY_GEMMA3, TINY_QWEN2_5_VL
from sglang_kv_canary.testing.tiny_tokenizer import token_of
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs import feature_serving
from sglang_kv_canary_rigs.cpu_cores import bind_each_rank
from sglang_kv_canary_rigs.eagle_serving import EagleE2EBase, scripted_answer
from sglang_kv_canary_rigs.hicache_serving import hits
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.pd_images import MORE, TEXT, see, see_both
from sglang_kv_canary_rigs.pd_pairs import (
    BY_HAND,
    FAULTS,
    LOG_OR_RAISE,
    SWEPT,
    OverAPrefixCache,
    Pair,
    requests,
)
from sglang_kv_canary_rigs.pd_serving import (
    CachingServing,
    PdServing,
    Replicas,
    ServesPair,
    transit_faults,
)
from sglang_kv_canary_rigs.qwen_images import (
    QWEN,
    QWEN_EAGLE,
    QWEN_WEIGHTS,
    EncodedPrefill,
    EncodedServing,
    embeddings_on_cpu,
)
from sglang_kv_canary_rigs.tiny_lora import WithAdapter

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=25, suite="stage-a-test-cpu")

PINNED = () if torch.cuda.is_available() or release().has_own_canary else (pageable_memory,)
REQUESTS = requests(36)


class TestImages(Pair):
    flags: ClassVar = {**SWEPT, "kv_canary": LOG_OR_RAISE}
    mode_name: ClassVar = feature_serving.MODES["images"].name
    plugins: ClassVar = (*PINNED, transit_faults)

    def test_clean_run(self) -> None:
        answers: dict[Any, Any] = {}
        see(self.serving, "first", 70, 80)  # counters begin with it
        for turn in range(2):
            for shades in ((10, 20), (10, 30), (40, 20)):
                before = self.checked_on_arrival()
                answer = see(self.serving, f"see-{shades}-{turn}", *shades)
                assert answers.setdefault(shades, answer["output_ids"]) == answer["output_ids"]
                length = answer["meta_info"]["prompt_tokens"]
                assert self.checked_on_arrival() - before >= length > 20
        self.assert_clean_and_all_checked()

    @FAULTS
    def test_damage_in_transit(self) -> None:
        self.expect_violations()
        with self.serving.damaging("reverse_slots"):
            see(self.serving, "reverse_slots", 50, 60)
        event = self.assert_found("reverse_slots")
        assert event["reader"]["mode"] == "ARRIVAL"


class ManyImages(TestImages):
    """With longer texts, so that prefixes end behind an image, and text alone. `adapters`: of the requests."""

    adapters: ClassVar[tuple[str | None, ...]] = (None,)

    def test_clean_run(self) -> None:
        rng = random.Random("images")
        answers: dict[Any, Any] = {}
        for i in range(REQUESTS):
            shades = rng.choice([(10, 20), (10, 30), (40, 20)])
            text, name = TEXT + rng.randrange(3) * MORE, rng.choice(self.adapters)
            more = {"lora_path": name} if name else {}
            answer = see(self.serving, f"see-{i}", *shades, text=text, **more)["output_ids"]
            assert answers.setdefault((shades, text, name), answer) == answer
            if rng.random() < 0.3:
                self.ask(f"text-{i}", random_tokens(rng, rng.randrange(5, 60)), **more)
        self.assert_clean()

    def assert_clean(self) -> None:
        self.assert_clean_and_all_checked()


@BY_HAND
class TestImagesOnReplicas(ManyImages):
    transport: ClassVar = Replicas

    def test_both_replicas_have_served(self) -> None:
        ranks = {event["dp_rank"] for event in self.serving.events("health")}
        assert ranks == {0, 1}


@BY_HAND
class TestImagesOverAPrefixCache(OverAPrefixCache, ManyImages):
    transport: ClassVar = CachingServing

    def ask_whole(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """The prefix ends behind the images, instead of `prompt`."""
        text = TEXT + MORE * (name == "behind")
        return see(self.serving, name, 60, 50, text=text)


class ImagesOnHost(PdServing):
    prefill_flags: ClassVar = SMALL_POOL


@BY_HAND
class TestImagesWithHiCache(ManyImages):
    """Prefixes with images come back from host memory."""

    transport: ClassVar = ImagesOnHost
    plugins: ClassVar = (*(() if release().has_own_canary else FILL_INS), transit_faults)

    def test_from_host_memory(self) -> None:
        found = 0
        first: dict[int, Any] = {}
        for turn in range(2):
            for shade in range(100, 200, 10):
                name = f"host-{turn}-{shade}"
                prefill, decode = see_both(self.serving, name, shade, 50, text=TEXT + MORE)
                answer = decode["output_ids"]
                assert first.setdefault(shade, answer) == answer
                found += hits(prefill)
        assert found > 0
        self.assert_no_violations()


WITH_LORA = {
    **TestImages.flags,
    "enable_lora": True,
    "lora_backend": "triton" if torch.cuda.is_available() else "torch_native",
}


@pytest.mark.skipif(
    not release().has_own_canary,
    reason="LoRA of this release cannot compute this model; lifted by make test",
)
@BY_HAND
class TestImagesWithLora(WithAdapter, ManyImages):
    """The chain starts from the adapter's name, and goes on over the numbers of images."""

    mode_name: ClassVar = feature_serving.MODES["images_weights"].name
    flags: ClassVar = WITH_LORA
    adapters: ClassVar = (None, "red")

    adapter: ClassVar = {"of": TINY_GEMMA3["text_config"]}

    def test_the_adapter_is_at_work(self) -> None:
        plain = see(self.serving, "plain", 90, 80)["output_ids"]
        assert see(self.serving, "red", 90, 80, lora_path="red")["output_ids"] != plain
        self.assert_no_violations()


class StagesToOne(PdServing):
    prefill_flags: ClassVar[dict[str, Any]] = {"pp_size": 2}
    prefill_env: ClassVar = bind_each_rank(2)


class StagesToStages(StagesToOne):
    decode_flags: ClassVar[dict[str, Any]] = StagesToOne.prefill_flags
    decode_env: ClassVar = StagesToOne.prefill_env


@BY_HAND
class TestPositionsInThreeDimensions(ManyImages):
    """Qwen2.5-VL: the positions of its attention are not those of tokens, and prompts come in chunks."""

    mode_name: ClassVar = QWEN

    @FAULTS
    @pytest.mark.parametrize("half", ["K", "V"])
    def test_bytes_that_change_after_arrival(self, half: str) -> None:
        injection = self.inject("flip_bytes", half=half, source=1, mode="DECODE")
        see(self.serving, "later", 50, 60)
        done = injection.answer()
        self.assert_violation("CONTENT", f"TAIL_{half}_FULL", slot=done["slots"][0])
        self.assert_all_explained(done)

    @FAULTS
    @pytest.mark.parametrize("fault", ["drop_layer", "drop_records"])
    def test_more_damage_in_transit(self, fault: str) -> None:
        self.expect_violations()
        with self.serving.damaging(fault):
            see(self.serving, fault, 50, 60)
        assert self.assert_found(fault)["reader"]["mode"] == "ARRIVAL"


@BY_HAND
@pytest.mark.skipif(PdServing.backend == "nixl", reason="Mooncake alone has run this")
class TestImagesOnStages(TestPositionsInThreeDimensions):
    """Both servers have two pipeline stages. The first one sees the images."""

    transport: ClassVar = StagesToStages
    flags: ClassVar = {**TestImages.flags, "pp_size": 2}


@BY_HAND
@pytest.mark.skipif(PdServing.backend == "nixl", reason="refused by name over NIXL")
class TestImagesFromStages(ManyImages):
    """The prefill server has two pipeline stages, so bytes are taken over as they arrive."""

    mode_name: ClassVar = QWEN
    transport: ClassVar = StagesToOne

    def assert_clean(self) -> None:
        self.assert_no_violations()
        self.assert_healthy()
        assert "the servers differ in pipeline parallelism" in self.serving.stderr


@BY_HAND
class TestPositionsInThreeDimensionsWithLora(WithAdapter, TestPositionsInThreeDimensions):
    mode_name: ClassVar = QWEN_WEIGHTS
    flags: ClassVar = WITH_LORA
    adapters: ClassVar = (None, "red")
    adapter: ClassVar = {"of": {**TINY_QWEN2_5_VL, "head_dim": 16}}

    def test_the_adapter_is_at_work(self) -> None:
        plain = see(self.serving, "plain", 90, 80)["output_ids"]
        assert see(self.serving, "red", 90, 80, lora_path="red")["output_ids"] != plain
        self.assert_no_violations()


class WithDrafts(ServesPair, EagleE2EBase):
    mode_name: ClassVar = QWEN_EAGLE
    flags: ClassVar = {**EagleE2EBase.flags, "log_level": "warning", "kv_canary": LOG_OR_RAISE}
    plugins: ClassVar = (*PINNED, transit_faults)

    def test_clean_run(self) -> None:
        rng = random.Random("eagle")
        for i in range(REQUESTS):
            shades = rng.choice([(10, 20), (10, 30), (40, 20)])
            text = TEXT + rng.randrange(2) * MORE
            answer = see(self.serving, f"see-{i}", *shades, text=text)["output_ids"]
            assert answer == scripted_answer([token_of(text[-1])], 5)
            if rng.random() < 0.3:
                prompt = random_tokens(rng, rng.randrange(5, 60))
                assert self.ask(f"text-{i}", prompt) == scripted_answer(prompt, 6)
        self.assert_no_violations()
        self.assert_healthy()
        counters = self.settle()
        assert all(counters[tag]["written"] for tag in self.mode.tags("TAIL"))

    @FAULTS
    @pytest.mark.parametrize("fault", ["reverse_slots", "drop_layer"])
    def test_damage_in_transit(self, fault: str) -> None:
        self.expect_violations()
        with self.serving.damaging(fault):
            see(self.serving, fault, 50, 60)
        found = {event["runner"] for event in self.violations()}
        assert found == {"reverse_slots": {"target", "draft"}, "drop_layer": {"draft"}}[fault]
        assert {event["reader"]["request_id"] for event in self.violations()} == {fault}


@BY_HAND
class TestImagesWithEagle3(WithDrafts):
    """The draft model gets the embeddings of images from the target."""

    speculation: ClassVar = {**V2, "speculative_algorithm": "EAGLE3"}

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_eagle3(folder)


OF_A_WORD = pytest.mark.skipif(
    release().has_own_canary, reason="SGLang itself ends with an image; lifted by make test"
)


@OF_A_WORD
@BY_HAND
class TestImagesWithEagle(WithDrafts):
    """The draft model gets the embedding of one word for all tokens of images."""

    speculation: ClassVar = {**V2, "speculative_algorithm": "EAGLE"}


@OF_A_WORD
@BY_HAND
class TestImagesWithEagleV1(TestImagesWithEagle):
    speculation: ClassVar = {**V1, "speculative_algorithm": "EAGLE"}


@BY_HAND
class TestSeparateEncoders(ManyImages):
    """Both servers number an image by its embeddings."""

    mode_name: ClassVar = QWEN
    transport: ClassVar = EncodedServing
    plugins: ClassVar = (*TestImages.plugins, embeddings_on_cpu)

    def assert_clean(self) -> None:
        super().assert_clean()
        asked = (self.serving.encoder.folder / "stdout").read_text()
        assert asked.count("POST /encode") > REQUESTS  # by both servers


@BY_HAND
class TestSeparateEncodersOfPrefill(ManyImages):
    """The servers number an image differently, so that the KV of such requests is not checked on arrival."""

    mode_name: ClassVar = QWEN
    transport: ClassVar = EncodedPrefill
    plugins: ClassVar = TestSeparateEncoders.plugins

    def assert_clean(self) -> None:
        self.assert_no_violations()
        self.assert_healthy()
        assert "number its images in different ways" in self.serving.stderr

    @FAULTS
    def test_damage_in_transit(self) -> None:
        """Of text."""
        self.expect_violations()
        with self.serving.damaging("reverse_slots"):
            self.ask("reverse_slots", list(range(20, 60)))
        assert self.assert_found("reverse_slots")["reader"]["mode"] == "ARRIVAL"


class OtherNumbers(PdServing):
    prefill_env: ClassVar = {"SGLANG_MM_SKIP_COMPUTE_HASH": "1"}


@long_on_newer_releases
class TestOtherNumbers(Pair):
    """The prefill server numbers images at random. Text is checked as before."""

    mode_name: ClassVar = TestImages.mode_name
    transport: ClassVar = OtherNumbers
    plugins: ClassVar = TestImages.plugins

    def test_clean_run(self) -> None:
        for i in range(3):
            assert len(see(self.serving, f"see-{i}", 10, 20 + i)["output_ids"]) == 5
        self.assert_no_violations()
        assert self.serving.stderr.count("number its images in different ways") == 1
        before = self.checked_on_arrival()
        self.ask("text", list(range(20, 60)), 1)
        assert self.checked_on_arrival() - before >= 40


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
