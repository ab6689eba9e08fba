"""DFLASH and multi-layer EAGLE on a real server: the draft model's KV is not checked, the target's is."""

import asyncio
import random
import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.fault_cases import Case
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.spec_fault_cases import EVERYWHERE, VERIFY, EagleFaults, flips
from sglang_kv_canary_rigs.unchecked_drafts import DflashE2EBase, LayersE2EBase

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")
register_cuda_ci(est_time=200, suite="stage-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(
    "DFLASH and multi-layer EAGLE" in {case.name for case in release().refusals()},
    reason="this release refuses them; lifted by make test SGLANG=0.5.23",
)
K, V = flips("target", VERIFY)
ROW = ("target", Case("other_requests_row", "ROW_CHAIN", ("HEAD_K_FULL",), VERIFY))
FREED = ("target", Case("free_live_slot", "USE_AFTER_FREE", EVERYWHERE, VERIFY))


class UncheckedDraftFaults(EagleFaults):
    def test_clean(self) -> None:
        self.converse("unchecked", rounds=3)
        self.assert_clean()

    def test_the_server_says_so_once(self) -> None:
        assert self.serving.stderr.count("the draft model's KV is not checked: ") == 1


class TestDflash(DflashE2EBase, UncheckedDraftFaults):
    @pytest.mark.parametrize(("role", "case"), [K, V, ROW, FREED], ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")


class TestDflashMixedChunks(DflashE2EBase):
    """A request between two verifies joins the prefill of others, as an extend by one token."""

    speculation: ClassVar = {**DflashE2EBase.speculation, "enable_mixed_chunk": True}

    def test_clean(self) -> None:
        assert self.serving.get("/server_info")["enable_mixed_chunk"]
        self.run(self._some_at_once())
        self.assert_no_violations()

    async def _some_at_once(self) -> None:
        """As one ends, another is prefilled beside those that run."""
        draws, limit = random.Random(1), asyncio.Semaphore(6)

        async def one(name: str, prompt: list[int], count: int) -> None:
            async with limit:
                await self.serving.generate(name, prompt, count)

        asked = []
        for i in range(30):
            prompt = random_tokens(draws, draws.randrange(3, 60))
            asked.append(one(f"mixed-{i}", prompt, draws.randrange(2, 40)))
        await asyncio.gather(*asked)


class TestLayers(LayersE2EBase, UncheckedDraftFaults):
    @pytest.mark.parametrize(("role", "case"), [V, FREED], ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
