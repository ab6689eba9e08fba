"""DeepSeek-V4 over two pipeline stages, alone and with drafts of its MTP layer. The last stage has that layer."""

from __future__ import annotations

import random
import sys
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.family_traffic import FamilyShape, drive_families
from sglang_kv_canary.testing.mode_config import why_dsv4_cannot_be_served
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary_rigs.dsv4_serving import EAGLE, REQUESTS, Dsv4E2EBase
from sglang_kv_canary_rigs.on_releases import from_0_5_22

register_cuda_ci(est_time=500, suite="stage-b-test-2-gpu-large")

MISSING = why_dsv4_cannot_be_served()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU"),
]

STAGES = (0, 1)


class TestStages(CanaryE2EBase):
    """First clean traffic, then a flipped byte on each stage."""

    mode_name = "dsv4"
    flags: ClassVar[dict[str, Any]] = {**Dsv4E2EBase.flags, "pp_size": len(STAGES)}
    env: ClassVar = Dsv4E2EBase.env
    runners: ClassVar = [(0, "target"), (1, "target")]
    mode_of_decodes: ClassVar = "DECODE"

    def test_clean(self) -> None:
        shape = FamilyShape.of_dsv4(REQUESTS, seed=43)
        report = self.run(drive_families(self.serving, shape))
        assert report.requests == shape.requests
        self.assert_no_violations()
        self.assert_healthy()
        active = self.serving.events("active")
        assert sorted((event["pp_rank"], event["runner"]) for event in active) == self.runners
        for stage, role in self.runners:
            counters = self.serving.send("counters", 0, role, stage).answer()["counters"]
            heads = {tag: of for tag, of in counters.items() if tag.startswith("HEAD_K")}
            assert "HEAD_K_SWA" in heads
            assert all(of["checked"] == of["eligible"] > 0 for of in heads.values()), counters

    @pytest.mark.parametrize("stage", STAGES)
    def test_flipped_byte_is_found_on_its_stage(self, stage: int) -> None:
        where = {"kind": "SWA", "mode": self.mode_of_decodes, "min_prefix": 300, "position": 260}
        injection = self.inject("flip_bytes", pp_rank=stage, **where)
        rng = random.Random(f"stage{stage}")
        prompts = [(f"stage{stage}-{i}", random_tokens(rng, 300), 24) for i in range(4)]
        self.generate_together(prompts)
        done = injection.answer()
        assert self.reported_in_forwards("CONTENT") == {"TAIL_K_SWA"}
        found = {(event["runner"], event["pp_rank"]) for event in self.violations()}
        assert found == {("target", stage)}
        self.assert_all_explained(done)


@from_0_5_22
class TestEagleOverStages(TestStages):
    flags: ClassVar = {**TestStages.flags, **EAGLE, "disable_overlap_schedule": True}
    env: ClassVar = {**TestStages.env, "SGLANG_ENABLE_PP_SPEC": "1"}
    runners: ClassVar = [(0, "target"), (1, "draft"), (1, "target")]
    mode_of_decodes: ClassVar = "TARGET_VERIFY"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
