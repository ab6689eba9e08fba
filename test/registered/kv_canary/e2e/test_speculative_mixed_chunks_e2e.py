"""Speculation with mixed chunks: a request between two verifies joins others' prefill, as an extend by one token."""

import asyncio
import random
import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.eagle_mode import V2
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary_rigs.eagle_serving import EagleE2EBase
from sglang_kv_canary_rigs.on_releases import from_0_5_22
from sglang_kv_canary_rigs.unchecked_drafts import DflashE2EBase

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")
register_cuda_ci(est_time=120, suite="stage-b-test-1-gpu-large")

pytestmark = from_0_5_22
REQUESTS = 30


class MixedChunks(CanaryE2EBase):
    def test_clean(self) -> None:
        assert self.serving.get("/server_info")["enable_mixed_chunk"]
        self.run(self._some_at_once())
        self.assert_no_violations()
        assert len(self._mixed()) > REQUESTS / 3

    async def _some_at_once(self) -> None:
        """As one ends, another is prefilled beside those that run."""
        draws, limit = random.Random(1), asyncio.Semaphore(6)

        async def one(name: str, prompt: list[int], count: int) -> None:
            async with limit:
                await self.serving.generate(name, prompt, count)

        asked = []
        for i in range(REQUESTS):
            prompt = random_tokens(draws, draws.randrange(3, 60))
            asked.append(one(f"mixed-{i}", prompt, draws.randrange(2, 40)))
        await asyncio.gather(*asked)

    def _mixed(self) -> list[str]:
        """Lines of SGLang's log about prefills beside running requests."""
        lines = self.serving.stderr.splitlines()
        return [
            line for line in lines if "Prefill batch" in line and "#running-req: 0," not in line
        ]


class TestDflash(DflashE2EBase, MixedChunks):
    """Nobody notes what a verify of DFLASH has accepted."""

    speculation: ClassVar = {
        **DflashE2EBase.speculation,
        "enable_mixed_chunk": True,
        "log_level": "info",
    }


class TestEagle(EagleE2EBase, MixedChunks):
    speculation: ClassVar = {**V2, "enable_mixed_chunk": True, "log_level": "info"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
