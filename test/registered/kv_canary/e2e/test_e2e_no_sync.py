"""On a GPU, no step of the canary waits for the device: 200 decode steps with every wait turned into an error."""

import random
import sys
from typing import ClassVar

import aiohttp
import pytest
import torch

from sglang.test.ci.ci_register import register_cuda_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary_rigs.strict_sync import no_synchronisation, one_synchronisation

register_cuda_ci(est_time=90, suite="stage-b-test-1-gpu-small")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EVERYTHING = {"kv_canary": "raise", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 7}
STEPS = 200


def prompt(name: str) -> list[int]:
    return random_tokens(random.Random(name), 30)


class TestNoStepWaits(CanaryE2EBase):
    flags: ClassVar = EVERYTHING
    env: ClassVar = {"SGLANG_KV_CANARY_TOKEN_CHECK": "all"}
    plugins: ClassVar = (no_synchronisation,)

    def launches(self) -> int:
        return self.settle().get("HEAD_K_FULL", {"launches": 0})["launches"]

    def test_decode_steps(self) -> None:
        before = self.launches()
        answer = self.generate("long", prompt("long"), STEPS + 1)
        assert len(answer) == STEPS + 1
        assert self.launches() - before > STEPS
        self.assert_no_violations()

    def test_mixed_traffic(self) -> None:
        report = self.serve(TrafficShape(150, seed=5, flushes=1, name="mixed"))
        assert (report.requests, report.flushes) == (150, 1)
        self.assert_no_violations()


class TestAWaitIsNoticed(CanaryE2EBase):
    ends_server = True
    flags: ClassVar = EVERYTHING
    plugins: ClassVar = (no_synchronisation, one_synchronisation)

    def test_it_ends_the_server(self) -> None:
        with pytest.raises(aiohttp.ClientError):
            self.generate("waits", prompt("waits"), 8)
        assert self.serving.process.wait(consts.PROCESS_TIMEOUT_S) != 0
        assert "synchronizing CUDA operation" in self.serving.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
