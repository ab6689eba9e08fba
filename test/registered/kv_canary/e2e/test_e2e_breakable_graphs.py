"""Breakable CUDA graphs: prefill graphs that are cut at the attention layers. GPU only."""

from __future__ import annotations

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

register_cuda_ci(est_time=90, suite="stage-b-test-1-gpu-small")

if not torch.cuda.is_available():
    pytest.skip("SGLang captures CUDA graphs on a CUDA GPU only", allow_module_level=True)
pytest.importorskip("cuda.bindings", reason="SGLang's breakable graphs need cuda-python")


class BreakableGraphs(CanaryE2EBase):
    """A clean run in RAISE mode, ended by a fault."""

    ends_server = True

    def test_clean_requests_raise_no_alarm(self) -> None:
        report = self.serve(TrafficShape(400, seed=41))
        assert (report.requests, report.flushes) == (400, 3)
        self.assert_no_violations()
        for tag, counter in self.settle().items():
            assert counter["checked"] == counter["eligible"] > 10_000, tag

    def test_damaged_bytes_are_found(self) -> None:
        self.inject("flip_bytes", mode="DECODE", half="V", source=1)
        with pytest.raises(aiohttp.ClientError):
            self.generate("victim", random_tokens(random.Random("last"), 30), 64)
        assert self.serving.process.wait(consts.PROCESS_TIMEOUT_S) != 0
        assert [v["reasons"] for v in self.serving.events("violation")] == [["CONTENT"]]


class TestBreakablePrefillGraphs(BreakableGraphs):
    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "enable_breakable_cuda_graph": True,
    }


class TestBreakableDecodeGraphs(BreakableGraphs):
    flags: ClassVar = {"kv_canary": "raise", "kv_canary_real_data": "all"}
    env: ClassVar = {"SGLANG_USE_BREAKABLE_CUDA_GRAPH": "1"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
