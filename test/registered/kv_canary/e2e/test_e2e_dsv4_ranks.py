"""DeepSeek-V4 as it is deployed: tensor parallelism, data-parallel attention, DeepEP and EAGLE with its MTP layer.

Once with DeepEP, once without it. Where DeepEP is missing, its exchange of tokens runs in plain torch, without CUDA
graphs (`expert_fill_ins`), and nothing drafts.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.family_traffic import FamilyShape, drive_families
from sglang_kv_canary.testing.mode_config import MODES, why_dsv4_cannot_be_served
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary_rigs.expert_fill_ins import deepep_in_plain_torch

register_cuda_ci(est_time=500, suite="stage-b-test-2-gpu-large")

MISSING = why_dsv4_cannot_be_served()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU"),
]

REQUESTS = int(os.environ.get("KV_CANARY_TEST_OVERLAP_REQUESTS", "64"))  # a multiple of 16
RANKS = (0, 1)
TARGET_KINDS = ("SWA", "C4", "C4_INDEXER", "C128")
DEEPEP = find_spec("deep_ep") is not None
NO_DEEPEP = "needs the module deep_ep, not installed"
# SGLang's attention backend for V4 drafts in CUDA graphs only: outside of them it refuses the draft's slots.
SPECULATION = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
_DSV4 = MODES["dsv4"]
_ON_RANKS = {
    **_DSV4.server_args,
    "tp_size": len(RANKS),
    "dp_size": len(RANKS),
    "enable_dp_attention": True,
    "chunked_prefill_size": len(RANKS) * consts.DSV4_CHUNK,  # SGLang divides it by the ranks
    "max_running_requests": len(RANKS) * consts.DSV4_RUNNING_REQUESTS,
    "disable_custom_all_reduce": True,  # another kernel to compile at start-up
}


def _add_mode(name: str, arguments: dict[str, Any], deep_gemm: bool = False) -> str:
    env = {**_DSV4.env, "SGLANG_ENABLE_JIT_DEEPGEMM": str(int(deep_gemm))}
    MODES[name] = replace(_DSV4, name=name, server_args={**_ON_RANKS, **arguments}, env=env)
    return name


class OnRanks(CanaryE2EBase):
    """First clean traffic, then a flipped byte of each kind of row on each rank."""

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

    def counters_of(self, rank: int, role: str) -> dict[str, Any]:
        return self.serving.send("counters", rank, role).answer()["counters"]

    def decodes(self) -> str:
        return "TARGET_VERIFY" if "draft" in self.kinds else "DECODE"

    def test_clean_on_both_ranks(self) -> None:
        shape = FamilyShape.of_dsv4(REQUESTS, seed=41)
        report = self.run(drive_families(self.serving, shape))
        assert report.requests == shape.requests
        self.assert_no_violations()
        self.assert_healthy()
        assert {event["runner"] for event in self.serving.events("health")} == {*self.kinds}
        for rank in RANKS:
            for role, kinds in self.kinds.items():
                counters = self.counters_of(rank, role)
                for tag in (f"{side}_K_{kind}" for side in ("HEAD", "TAIL") for kind in kinds):
                    of = counters[tag]
                    assert of["checked"] == of["eligible"] > 0, (rank, role, tag)
                    assert tag.startswith("HEAD") or of["written"] > 0, (rank, role, tag)

    @pytest.mark.parametrize("kind", TARGET_KINDS)
    @pytest.mark.parametrize("rank", RANKS)
    def test_flipped_byte_is_found_on_its_rank(self, rank: int, kind: str) -> None:
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
        found = {(e["runner"], e["rank"], e["dp_rank"]) for e in self.violations()}
        assert found == {("target", rank, rank)}
        self.assert_all_explained(done)


class TestEagle(OnRanks):
    """Each rank computes its part of every expert."""

    mode_name = _add_mode("dsv4_ranks", SPECULATION)


@pytest.mark.skipif(not DEEPEP, reason=NO_DEEPEP)
class TestDeepEP(OnRanks):
    """Each rank computes its own experts, for the tokens of both."""

    # DeepEP's own way of computing experts needs DeepGEMM.
    mode_name = _add_mode(
        "dsv4_deepep",
        {**SPECULATION, "moe_a2a_backend": "deepep", "deepep_mode": "auto"},
        deep_gemm=True,
    )


@pytest.mark.skipif(DEEPEP, reason="DeepEP is installed: see TestDeepEP")
class TestExchangeInPlainTorch(OnRanks):
    # In `normal` mode SGLang captures no graph.
    mode_name = _add_mode(
        "dsv4_exchange",
        {"moe_a2a_backend": "deepep", "deepep_mode": "normal", "disable_cuda_graph": True},
    )
    kinds: ClassVar = {"target": TARGET_KINDS}
    plugins: ClassVar = (deepep_in_plain_torch,)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
