"""Speculation in step with other ranks: drafts and verifies that are padded or idle because of data-parallel attention.

SGLang needs fill-ins for this on a CPU, see `eagle_dp_serving.py`. There no CUDA graph pads anything.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from typing import ClassVar

import pytest
import torch

from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.eagle_mode import V1
from sglang_kv_canary.testing.fault_cases import Case
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.beside_prefills import (
    COORDINATION,
    BesidePrefillsE2EBase,
    MtpBesidePrefillsE2EBase,
)
from sglang_kv_canary_rigs.eagle_dp_serving import (
    MANY,
    RANKS,
    REQUESTS,
    EagleDpE2EBase,
    MtpDpE2EBase,
)
from sglang_kv_canary_rigs.eagle_dsa_serving import DsaDpE2EBase
from sglang_kv_canary_rigs.on_releases import LONG, by_default_on_newer_releases
from sglang_kv_canary_rigs.spec_fault_cases import EVERYWHERE, VERIFY, one_flip_each
from sglang_kv_canary_rigs.unchecked_drafts import DflashInStepE2EBase, LayersInStepE2EBase

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")
register_cuda_ci(est_time=240, suite="stage-b-test-2-gpu-large")

REFUSED = {refusal.name for refusal in release().refusals()}
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.device_count() == 1, reason="needs a second GPU, or no GPU and the CPU engine"
    ),
]
finds_faults = pytest.mark.skipif(MANY in os.environ, reason=f"{MANY} is set: mode raise")
by_hand = pytest.mark.skipif(MANY not in os.environ, reason=f"set {MANY}")
by_hand_or_long = pytest.mark.skipif(
    MANY not in os.environ and os.environ.get(LONG) != "1", reason=f"set {MANY}, or {LONG}=1"
)
on_first_release = pytest.mark.skipif(
    release().has_own_canary, reason="v1 and trees are on the first release only"
)
target_alone = pytest.mark.skipif(
    "DFLASH and multi-layer EAGLE" in REFUSED,
    reason="this release refuses it; lifted by make test SGLANG=0.5.23",
)
FLIPS = [(rank, role, case) for rank, (role, case) in enumerate(one_flip_each())]


class InStep(EagleDpE2EBase):
    """First clean traffic, then faults: one in the target's pool of rank 0, one in the draft's pool of rank 1."""

    def test_clean(self) -> None:
        self.serve_in_waves("clean", REQUESTS)
        self.assert_clean()
        self.assert_all_checked()

    def test_no_rank_waits_for_another(self) -> None:
        """One rank idles while the other one serves, and while its request is aborted. Then both serve."""

        async def one_then_two(turn: int) -> None:
            long = asyncio.ensure_future(self.serving.generate(f"long-{turn}", [11 + turn], 150))
            await asyncio.sleep(0.5)
            await self.serving.abort(f"long-{turn}")
            assert len(await long) < 150, "the request ended before its abort"
            both = [self.serving.generate(f"both-{turn}-{i}", [20 + i, turn], 6) for i in RANKS]
            assert [len(answer) for answer in await asyncio.gather(*both)] == [6, 6]

        for turn in range(3):
            self.run_within(one_then_two(turn))
        self.assert_no_violations()
        self.assert_healthy()

    @finds_faults
    @pytest.mark.parametrize(("rank", "role", "case"), FLIPS, ids=str)
    def test_fault_is_found_on_its_rank(self, rank: int, role: str, case: Case) -> None:
        if role not in self.runners:
            pytest.skip("the draft model's KV is not checked")
        if role == "draft" and torch.cuda.is_available():
            pytest.skip("draft graphs are replayed past the forward in which faults are injected")
        self.check(rank, role, case, requests=3)

    def check(self, rank: int, role: str, case: Case, requests: int) -> None:
        case = self.of_this_pool(case)
        injection = self.inject(case.fault, rank, role=role, **case.args)
        name = f"{rank}-{role}-{case}"
        rng = random.Random(name)
        # Longer answers where two requests of a rank must meet: they come one by one.
        count = 12 if requests == 3 else 30
        self.generate_together(
            [(f"{name}-{i}", random_tokens(rng, 12), count) for i in range(requests)]
        )
        done = injection.answer()
        self.assert_found_on(rank, role, case)
        self.assert_all_explained(done)


@by_default_on_newer_releases
class TestEagle3(InStep):
    """v2. Each rank has a draft model of its own."""

    @finds_faults
    def test_page_table_of_a_padded_rank(self) -> None:
        self.check(1, "target", Case("other_requests_slot", "CHAIN", EVERYWHERE, VERIFY), 5)


TREES = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}


@on_first_release
class TestMtpTrees(InStep, MtpDpE2EBase):
    """v1, MLA. The ranks share the draft model's experts."""

    speculation: ClassVar = {**V1, **TREES}


@pytest.mark.skipif(not release().has_own_canary, reason="trees are v1 on the first release")
@by_hand_or_long
class TestTreesInStep(InStep):
    """v2. Accepted tokens move on each rank; a rank that is padded or idle has less to move, or nothing."""

    speculation: ClassVar = {**EagleDpE2EBase.speculation, **TREES}


class BesidePrefills(BesidePrefillsE2EBase):
    """v2. One rank drafts and verifies while the other one prefills."""

    def test_clean(self) -> None:
        self.serve_beside_prefills("clean", REQUESTS // 3 + 1)
        self.assert_clean()
        self.assert_all_checked()
        for rank in RANKS:
            assert all(len(self.noted(rank)[mode]) > 5 for mode in ("EXTEND", "DECODE"))

    @finds_faults
    @pytest.mark.parametrize(("rank", "role", "case"), FLIPS, ids=str)
    def test_fault_is_found_in_a_mixed_step(self, rank: int, role: str, case: Case) -> None:
        case, name = self.of_this_pool(case), f"{rank}-{role}"
        args = {**case.args, "rid": f"{name}-first"}
        injection = self.inject(case.fault, rank, role=role, **args)
        self.answer_beside_a_prefill(name, rank, random.Random(name))
        done = injection.answer()
        found = self.assert_found_on(rank, role, case)
        assert {e["reader"]["step"] for e in found} & self.noted(rank)["DECODE"]
        self.assert_all_explained(done)


beside_prefills = pytest.mark.skipif(
    not hasattr(envs, COORDINATION), reason="0.5.22 and newer draft beside prefills of other ranks"
)


@beside_prefills
class TestEagle3BesidePrefills(BesidePrefills):
    """Each rank has a draft model of its own."""


@by_hand
@beside_prefills
class TestMtpBesidePrefills(BesidePrefills, MtpBesidePrefillsE2EBase):
    """MLA. The ranks share the draft model's experts."""


@by_hand
class TestMtp(InStep, MtpDpE2EBase):
    """The same with v2."""


@by_hand
class TestDsa(InStep, DsaDpE2EBase):
    """The same with DeepSeek-V3.2: pools with indexer keys."""


@target_alone
@by_hand_or_long
class TestLayers(InStep, LayersInStepE2EBase):
    """Multi-layer EAGLE, v2."""


@pytest.mark.skipif(
    "NGRAM, frozen-KV MTP and DFLASH in step with other ranks" in REFUSED,
    reason="SGLang 0.5.12.post1 has no DFLASH with DP attention; lifted by make test SGLANG=0.5.23",
)
@target_alone
class TestDflash(InStep, DflashInStepE2EBase):
    """v2. A rank that idles runs the verify of the others as an IDLE forward, and drafts nothing.

    SGLang asks for a GPU there, in one check of its arguments, which the rig takes away on a CPU.
    """


@by_hand
@on_first_release
class TestEagle3Trees(InStep):
    speculation: ClassVar = {**TestMtpTrees.speculation, "speculative_algorithm": "EAGLE3"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
