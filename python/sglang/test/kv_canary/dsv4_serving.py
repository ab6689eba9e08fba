"""DeepSeek-V4 with EAGLE and its MTP layer, or on several ranks: clean traffic, and a flipped byte of each kind."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any, ClassVar

from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.family_traffic import FamilyShape, drive_families
from sglang_kv_canary.testing.traffic import random_tokens

__all__ = ["EAGLE", "TARGET_KINDS", "Dsv4E2EBase"]

REQUESTS = int(os.environ.get("KV_CANARY_TEST_OVERLAP_REQUESTS", "64"))  # a multiple of 16
TARGET_KINDS = ("SWA", "C4", "C4_INDEXER", "C128")
# 0.5.12.post1's attention backend for V4 drafts in CUDA graphs only: outside of them it refuses the draft's slots.
EAGLE: Mapping[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


class Dsv4E2EBase(CanaryE2EBase):
    """Clean traffic over `ranks`. Subclasses say on which of them bytes are flipped."""

    mode_name = "dsv4"
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }
    env: ClassVar = {
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20",
    }
    # The MTP layer has no compressed rows.
    kinds: ClassVar = {"target": TARGET_KINDS, "draft": ("SWA",)}
    ranks: ClassVar[tuple[int, ...]] = (0,)

    def counters_of(self, rank: int, role: str) -> dict[str, Any]:
        return self.serving.send("counters", rank, role).answer()["counters"]

    def decodes(self) -> str:
        return "TARGET_VERIFY" if "draft" in self.kinds else "DECODE"

    def test_clean(self) -> None:
        shape = FamilyShape.of_dsv4(REQUESTS, seed=41)
        report = self.run(drive_families(self.serving, shape))
        assert report.requests == shape.requests
        self.assert_no_violations()
        self.assert_healthy()
        assert {event["runner"] for event in self.serving.events("health")} == {*self.kinds}
        for rank in self.ranks:
            for role, kinds in self.kinds.items():
                counters = self.counters_of(rank, role)
                for tag in (f"{side}_K_{kind}" for side in ("HEAD", "TAIL") for kind in kinds):
                    of = counters[tag]
                    assert of["checked"] == of["eligible"] > 0, (rank, role, tag)
                    assert tag.startswith("HEAD") or of["written"] > 0, (rank, role, tag)

    def check_flipped_byte(self, rank: int, kind: str) -> None:
        """It is found, on its rank alone."""
        # The window of 127 tokens holds position 260, however many of the answer's 24 tokens are there.
        place = {"position": 260} if kind == "SWA" else {}
        injection = self.inject(
            "flip_bytes", rank, kind=kind, mode=self.decodes(), min_prefix=300, **place
        )
        rng = random.Random(f"{rank}{kind}")
        self.generate_together(
            [(f"{kind}-{rank}-{i}", random_tokens(rng, 300), 24) for i in range(4)]
        )
        done = injection.answer()
        assert self.reported_in_forwards("CONTENT") == {f"TAIL_K_{kind}"}
        found = {(e["runner"], e["rank"]) for e in self.violations()}
        assert found == {("target", rank)}
        self.assert_all_explained(done)
