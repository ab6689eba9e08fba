"""Prefill context parallelism of NSA: each rank computes every second token of a prompt, and stores the rows of all.

Without a GPU, SGLang's own code splits the prompts, exchanges rows and keys, and stores the rows.
"""

from __future__ import annotations

import os
import random
import re
import sys
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.mode_config import MODES, why_nsa_cannot_be_served
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary_rigs.nsa_fill_ins import (
    STORED_IN_PARTS,
    nsa_context_parallel_flags,
    nsa_context_parallel_on_torch_native,
    nsa_on_torch_native,
)
from sglang_kv_canary_rigs.on_releases import by_default_on_newer_releases, fewer_on_newer_releases
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")
register_cuda_ci(est_time=300, suite="stage-b-test-2-gpu-large")

MISSING = why_nsa_cannot_be_served()
pytestmark = [
    by_default_on_newer_releases,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.skipif(
        torch.cuda.device_count() == 1, reason="needs a second GPU, or no GPU and the CPU engine"
    ),
]

REQUESTS = int(os.environ.get("KV_CANARY_TEST_OVERLAP_REQUESTS", volume(8, 64)))
ON_GPU = torch.cuda.is_available()
RANKS = (0, 1)
KINDS = ("FULL", "INDEXER")
_NSA = MODES["nsa"]
MODES["nsa_cp"] = replace(
    _NSA,
    name="nsa_cp",
    server_args={
        **_NSA.server_args,
        **nsa_context_parallel_flags(),
        # More kernels to compile at start-up
        "disable_custom_all_reduce": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,
    },
    env={**_NSA.env, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
)


class OnRanks(CanaryE2EBase):
    mode_name: ClassVar = "nsa_cp"
    env: ClassVar = {
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20",
    }
    plugins: ClassVar = (
        () if ON_GPU else (nsa_on_torch_native, nsa_context_parallel_on_torch_native)
    )

    def counters_of(self, rank: int) -> dict[str, Any]:
        return self.serving.send("counters", rank).answer()["counters"]


class TestRaise(OnRanks):
    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }

    def test_clean_and_every_row_is_on_each_rank(self) -> None:
        report = self.serve(TrafficShape(REQUESTS, seed=41, flushes=1))
        assert report.requests == REQUESTS
        self.assert_no_violations()
        self.assert_healthy()
        of_ranks = [self.counters_of(rank) for rank in RANKS]
        for tag in (f"{side}_K_{kind}" for side in ("HEAD", "TAIL") for kind in KINDS):
            for counters in of_ranks:
                assert counters[tag]["checked"] == counters[tag]["eligible"] > 0, tag
            first, second = (counters[tag]["written"] for counters in of_ranks)
            assert first == second > 30 * REQUESTS, tag
        if not ON_GPU:
            self.assert_same_bytes()

    def assert_same_bytes(self) -> None:
        """After each layer's attention over parts, both pools held the same."""
        said = re.findall(rf"{STORED_IN_PARTS} (\d) (\w+)", self.serving.stderr)
        first, second = ([sum for of, sum in said if of == str(rank)] for rank in RANKS)
        assert first == second
        assert len({*first}) > REQUESTS


class TestFaults(OnRanks):
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("computed_by", fewer_on_newer_releases(RANKS, RANKS[1:]))
    @pytest.mark.parametrize("rank", RANKS)
    def test_damage_of_a_prefill_is_found_on_its_rank(
        self, rank: int, computed_by: int, kind: str
    ) -> None:
        """The prompt is prefilled in two chunks. Rank 1 computes the odd positions of the first one."""
        place = {"kind": kind, "source": 1, "position": 30 + computed_by}
        fault = self.inject("flip_bytes", rank, mode="EXTEND", **place)
        prompt = random_tokens(random.Random(f"{rank}{computed_by}{kind}"), 100)
        self.generate(f"prefill-{rank}-{computed_by}-{kind}", prompt, 8)
        self.assert_found(rank, kind, fault.answer())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("rank", RANKS)
    def test_damage_of_a_decode_is_found_on_its_rank(self, rank: int, kind: str) -> None:
        fault = self.inject("flip_bytes", rank, kind=kind, mode="DECODE", min_prefix=50)
        rng = random.Random(f"{rank}{kind}")
        self.generate_together(
            [(f"decode-{rank}-{kind}-{i}", random_tokens(rng, 50), 12) for i in range(3)]
        )
        self.assert_found(rank, kind, fault.answer())

    def assert_found(self, rank: int, kind: str, done: dict[str, Any]) -> None:
        assert self.reported_in_forwards("CONTENT") == {f"TAIL_K_{kind}"}
        assert {event["rank"] for event in self.violations()} == {rank}
        self.assert_all_explained(done)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
