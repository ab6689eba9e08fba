"""DeepSeek-V4 as it is deployed: tensor parallelism, data-parallel attention, DeepEP and EAGLE with its MTP layer.

Once with DeepEP, once without it. Where DeepEP is missing, its exchange of tokens runs in plain torch, without CUDA
graphs (`expert_fill_ins`), and nothing drafts.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.mode_config import MODES, why_dsv4_cannot_be_served
from sglang_kv_canary_rigs.dsv4_serving import EAGLE, TARGET_KINDS, Dsv4E2EBase
from sglang_kv_canary_rigs.expert_fill_ins import deepep_in_plain_torch

register_cuda_ci(est_time=500, suite="stage-b-test-2-gpu-large")

MISSING = why_dsv4_cannot_be_served()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU"),
]

RANKS = (0, 1)
DEEPEP = find_spec("deep_ep") is not None
NO_DEEPEP = "needs the module deep_ep, not installed"
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


class OnRanks(Dsv4E2EBase):
    """First clean traffic, then a flipped byte of each kind of row on each rank."""

    ranks = RANKS

    @pytest.mark.parametrize("kind", TARGET_KINDS)
    @pytest.mark.parametrize("rank", RANKS)
    def test_flipped_byte_is_found_on_its_rank(self, rank: int, kind: str) -> None:
        self.check_flipped_byte(rank, kind)
        assert {event["dp_rank"] for event in self.violations()} == {rank}


class TestEagle(OnRanks):
    """Each rank computes its part of every expert."""

    mode_name = _add_mode("dsv4_ranks", EAGLE)


@pytest.mark.skipif(not DEEPEP, reason=NO_DEEPEP)
class TestDeepEP(OnRanks):
    """Each rank computes its own experts, for the tokens of both."""

    # DeepEP's own way of computing experts needs DeepGEMM.
    mode_name = _add_mode(
        "dsv4_deepep",
        {**EAGLE, "moe_a2a_backend": "deepep", "deepep_mode": "auto"},
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
