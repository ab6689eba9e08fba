"""Servers that split the model differently: tokens, positions and chains are checked, the bytes are taken over."""

import random
import sys
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.cpu_cores import bind_each_rank
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.pd_pairs import (
    BY_HAND,
    CHECKED,
    FAULTS,
    HEALTH,
    LOG_OR_RAISE,
    OverAPrefixCache,
    requests,
)
from sglang_kv_canary_rigs.pd_serving import (
    CachingServing,
    PdServing,
    ServesPair,
    transit_faults,
)

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

STAGES = pytest.mark.skipif(
    PdServing.backend == "nixl", reason="refused by name over NIXL; lifted over Mooncake"
)
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


class Unequal(ServesPair, CanaryE2EBase):
    transport: ClassVar[type[PdServing]]
    says: ClassVar[str]
    flags: ClassVar = {**CHECKED, "kv_canary": LOG_OR_RAISE}
    env: ClassVar = HEALTH
    plugins: ClassVar = (transit_faults,)

    def test_clean_run(self) -> None:
        self.serve(TrafficShape(requests(12), seed=3, flushes=1, name="clean"))
        self.assert_no_violations()
        self.assert_healthy()
        assert self.says in self.serving.stderr

    @FAULTS
    @pytest.mark.parametrize("fault", ["reverse_slots", "drop_all"])
    def test_damage_in_transit(self, fault: str) -> None:
        self.expect_violations()
        with self.serving.damaging(fault):
            self.ask(fault, random_tokens(random.Random(fault), consts.CHUNKED_PREFILL_SIZE + 7))
        reason = {"reverse_slots": "POSITION", "drop_all": "UNWRITTEN_SINCE_ALLOC"}[fault]
        event = self.assert_violation(reason, reader=fault)
        assert event["reader"]["mode"] == "ARRIVAL"
        assert {e["reader"]["request_id"] for e in self.violations()} == {fault}

    @FAULTS
    def test_bytes_that_change_after_they_were_taken_over(self) -> None:
        injection = self.inject("flip_bytes", half="V", mode="DECODE")
        self.ask("later", random_tokens(random.Random(6), 40), 24)
        done = injection.answer()
        self.assert_violation("CONTENT", "TAIL_V_FULL", slot=done["slots"][0])
        self.assert_all_explained(done)


class TwoToOne(PdServing):
    prefill_flags: ClassVar[dict[str, Any]] = {"tp_size": 2}
    prefill_env: ClassVar = TWO_RANKS


class OneToTwo(PdServing):
    decode_flags: ClassVar[dict[str, Any]] = {"tp_size": 2}
    decode_env: ClassVar = TWO_RANKS


class StagesToOne(PdServing):
    prefill_flags: ClassVar[dict[str, Any]] = {"pp_size": 2}
    prefill_env: ClassVar = bind_each_rank(2)


class StagesToACache(StagesToOne):
    decode_flags: ClassVar = CachingServing.decode_flags


class StagesToStages(StagesToOne):
    decode_flags: ClassVar[dict[str, Any]] = StagesToOne.prefill_flags
    decode_env: ClassVar = StagesToOne.prefill_env


@long_on_newer_releases
class TestTensorParallelPrefill(Unequal):
    transport: ClassVar = TwoToOne
    says: ClassVar = "the servers differ in tensor parallelism"


@BY_HAND
class TestTensorParallelDecode(Unequal):
    transport: ClassVar = OneToTwo
    says: ClassVar = "the servers differ in tensor parallelism"


@STAGES
class TestPipelinePrefill(Unequal):
    transport: ClassVar = StagesToOne
    says: ClassVar = "the servers differ in pipeline parallelism"


@BY_HAND
@STAGES
class TestPipelinePrefillToACache(OverAPrefixCache, Unequal):
    transport: ClassVar = StagesToACache
    says: ClassVar = "the servers differ in pipeline parallelism"
    damages: ClassVar = "reverse_slots"
    reason: ClassVar = "POSITION"


@BY_HAND
@STAGES
class TestPipeline(ServesPair, CanaryE2EBase):
    """Each stage sends to its counterpart, so the bytes are checked, too."""

    transport: ClassVar = StagesToStages
    flags: ClassVar = {**Unequal.flags, "pp_size": 2}
    env: ClassVar = Unequal.env
    plugins: ClassVar = (transit_faults,)

    def test_clean_run(self) -> None:
        self.serve(TrafficShape(requests(12), seed=3, flushes=1, name="clean"))
        self.assert_clean_and_all_checked()

    @FAULTS
    def test_damage_in_transit(self) -> None:
        self.expect_violations()
        with self.serving.damaging("drop_layer"):
            self.ask("both", random_tokens(random.Random("both"), 40))
        assert {e["reader"]["mode"] for e in self.violations()} == {"ARRIVAL"}
        assert {e["pp_rank"] for e in self.violations()} == {0, 1}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
