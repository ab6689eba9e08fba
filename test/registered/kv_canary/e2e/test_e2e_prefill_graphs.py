"""Prefill graphs of newer releases, which pad batches: padding is no write, faults in padded prefills are found.

On a GPU the graphs are SGLang's. Without one its runner pads and replays, but what it replays runs eagerly.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.eagle_mode import V2
from sglang_kv_canary.testing.family_traffic import FamilyShape, drive_families
from sglang_kv_canary.testing.fault_cases import Case, FaultCases, tags
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.eagle_serving import DraftsWithAWholeModel
from sglang_kv_canary_rigs.prefill_graphs import (
    NOTES,
    Replay,
    note_prefill_graphs,
    prefill_graphs_on_cpu,
    replays_in,
)
from sglang_kv_canary_rigs.spec_fault_cases import EagleFaults
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")
register_cuda_ci(est_time=240, suite="stage-b-test-1-gpu-small")

if not release().has_own_canary:
    pytest.skip(
        "this release has other prefill graphs, see test_e2e_breakable_graphs.py; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="SGLang captures these graphs on a CUDA GPU only")


def _captures_piecewise() -> bool:
    """SGLang 0.5.22 and 0.5.23 have removed these graphs."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

    try:
        CudaGraphConfig.from_dict({"prefill": {"backend": "tc_piecewise"}})
    except ValueError:
        return False
    return True


RAISE = {"kv_canary": "raise", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 1}
LOG = {"kv_canary": "log", "kv_canary_real_data": "all"}
EXTEND = {"mode": "EXTEND", "min_prefix": 0}
HEAD = tags("HEAD", "K V", "FULL")


class PrefillGraphs(CanaryE2EBase):
    """Notes what prefill graphs have run."""

    plugins: ClassVar = (
        (note_prefill_graphs,) if ON_GPU else (note_prefill_graphs, prefill_graphs_on_cpu)
    )

    @classmethod
    def setup_class(cls) -> None:
        cls._folder = tempfile.TemporaryDirectory(prefix="kv_canary_graphs_")
        cls.env = {**cls.env, NOTES: str(Path(cls._folder.name, "replays"))}
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls._folder.cleanup()

    def replays(self) -> list[Replay]:
        return replays_in(Path(self.env[NOTES]))

    def assert_graphs_were_at_work(self) -> None:
        """With and without padding, of one request and of several."""
        replays = self.replays()
        assert sum(r.padded_to > r.tokens for r in replays) >= 3
        assert sum(r.padded_to == r.tokens for r in replays) >= 3
        assert sum(r.requests > 1 for r in replays) >= 3


class Raise(PrefillGraphs):
    """A clean run, then a fault that a prefill finds. It ends the server."""

    ends_server = True
    flags: ClassVar = RAISE

    def test_clean_requests_raise_no_alarm(self) -> None:
        requests = 400 if ON_GPU else volume(50, 100)
        assert self.serve(TrafficShape(requests, seed=43)).requests == requests
        self.assert_no_violations()
        self.assert_graphs_were_at_work()
        for tag, counter in self.settle().items():
            assert counter["checked"] == counter["eligible"] > 1000, tag

    def test_damage_is_found_by_a_prefill(self) -> None:
        """Three chunks. The prefix of the last is damaged when it begins."""
        self.inject("flip_bytes", mode="EXTEND", min_prefix=100, half="V", source=1)
        before = len(self.replays())
        with pytest.raises(aiohttp.ClientError):
            self.generate("victim", random_tokens(random.Random("last"), 150), 8)
        assert self.serving.process.wait(consts.PROCESS_TIMEOUT_S) != 0
        assert len(self.replays()) == before + 3
        found, *again = self.serving.events("violation")
        assert (found["tag"], found["reasons"]) == ("TAIL_V_FULL", ["CONTENT"])
        # A sweep may be due before the server ends, and reads the same slot.
        assert {(v["tag"], v["slot"]) for v in again} <= {("SWEEP_V_FULL", found["slot"])}


class TestPrefillGraphs(Raise):
    """SGLang's default on NVIDIA GPUs: breakable graphs."""


@needs_gpu
@pytest.mark.skipif(not _captures_piecewise(), reason="this release has no piecewise graphs")
class TestPiecewisePrefillGraphs(Raise):
    flags: ClassVar = {**RAISE, "cuda_graph_backend_prefill": "tc_piecewise"}


class TestPrefillGraphFaults(PrefillGraphs, FaultCases):
    """Mixed batches. Two prompts of 30 tokens are one padded prefill."""

    flags: ClassVar = {**LOG, "enable_mixed_chunk": True}

    @pytest.mark.parametrize(
        "case",
        [
            Case("wrong_token", "WRITE_TOKEN", HEAD, EXTEND),
            Case("wrong_position", "WRITE_POSITION", HEAD, EXTEND),
        ],
        ids=str,
    )
    def test_wrong_input_of_a_padded_prefill(self, case: Case) -> None:
        before = len(self.replays())
        self.run_case(case, str(case))
        first = self.replays()[before]
        assert (first.requests, first.tokens, first.padded_to > 60) == (2, 60, True)

    def test_clean(self) -> None:
        self.serve(TrafficShape(volume(40, 60), seed=44))
        self.assert_no_violations()
        self.assert_graphs_were_at_work()


class TestPrefillGraphsOnSlidingWindows(PrefillGraphs, FaultCases):
    """Attention's SWA slots are those of the batch before it is padded."""

    mode_name = "swa"
    flags: ClassVar = LOG

    def test_stale_location(self) -> None:
        case = Case("stale_location", "WRITE_LOCATION", tags("HEAD", "K V", "SWA"), EXTEND)
        self.run_case(case, str(case))

    def test_clean(self) -> None:
        shape = FamilyShape(192 if ON_GPU else volume(24, 48), seed=45, rounds=volume(1, 2))
        assert self.run(drive_families(self.serving, shape)).requests == shape.requests
        self.assert_no_violations()
        self.assert_graphs_were_at_work()
        assert not self.serving.events("internal_error")


class TestEagleWithPrefillGraphs(PrefillGraphs, EagleFaults):
    """The target's prefills and the draft's, each in graphs of its own."""

    speculation: ClassVar = V2

    def test_clean(self) -> None:
        self.converse("graphs")
        self.assert_clean()
        replays = self.replays()
        assert sum(r.padded_to > r.tokens for r in replays) >= 3
        assert sum(r.requests > 1 for r in replays) >= 3


class TestStandaloneWithPrefillGraphs(DraftsWithAWholeModel, TestEagleWithPrefillGraphs):
    """Its draft-extend may run in a prefill graph, too, which pads it after its last request."""

    speculation: ClassVar = {**V2, "speculative_algorithm": "STANDALONE"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
