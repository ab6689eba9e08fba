"""Images over prefill-decode disaggregation: both servers number an image alike, by its bytes."""

import base64
import io
import sys
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.fill_ins import pageable_memory
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs import feature_serving
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.pd_pairs import Pair
from sglang_kv_canary_rigs.pd_serving import PdServing, Replicas, transit_faults
from sglang_kv_canary_rigs.volume import FULL_VOLUME

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=25, suite="stage-a-test-cpu")

PINNED = () if torch.cuda.is_available() or release().has_own_canary else (pageable_memory,)
TEXT = "see <start_of_image> and <start_of_image> what now?"


def picture(shade: int) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (40, 40), (shade, 255 - shade, 7)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def see(serving: PdServing, name: str, *shades: int) -> dict[str, Any]:
    body = {
        "rid": name,
        "text": TEXT,
        "image_data": [picture(shade) for shade in shades],
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
    }
    return serving.run(serving.ask(body))


class TestImages(Pair):
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
        self.assert_no_violations()
        self.assert_healthy()
        assert "not checked" not in self.serving.stderr

    def test_damage_in_transit(self) -> None:
        self.expect_violations()
        with self.serving.damaging("reverse_slots"):
            see(self.serving, "reverse_slots", 50, 60)
        event = self.assert_found("reverse_slots")
        assert event["reader"]["mode"] == "ARRIVAL"


@pytest.mark.skipif(not FULL_VOLUME, reason="needs KV_CANARY_TEST_FULL_VOLUME=1")
class TestImagesOnReplicas(TestImages):
    transport: ClassVar = Replicas

    def test_clean_run(self) -> None:
        answers: dict[Any, Any] = {}
        for i, shades in enumerate(12 * [(10, 20), (10, 30), (40, 20)]):
            answer = see(self.serving, f"see-{i}", *shades)["output_ids"]
            assert answers.setdefault(shades, answer) == answer
        self.assert_no_violations()
        self.assert_healthy()
        assert "not checked" not in self.serving.stderr
        ranks = {event["dp_rank"] for event in self.serving.events("health")}
        assert ranks == {0, 1}


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
