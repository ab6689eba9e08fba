"""SGLANG_KV_CANARY_ACTION=abort on a prefill and a decode server: exactly the requests that read damage end."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.hicache_mode import ON_CPU
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.containment_pairs import PairBase
from sglang_kv_canary_rigs.containment_serving import LONG
from sglang_kv_canary_rigs.containment_traffic import PairPool
from sglang_kv_canary_rigs.pd_serving import (
    AfterThePrefill,
    OverNixl,
    PdServing,
    nothing_to_synchronize,
)

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=45, suite="stage-a-test-cpu")

long_form = pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_CONTAINMENT_ROUNDS")


class TestPair(PairBase):
    pass


@long_form
class TestWithoutOverlap(PairBase):
    flags: ClassVar = {**PairBase.flags, "disable_overlap_schedule": True}


@long_form
class TestRetraction(PairBase):
    """SGLang retracts a request in every 20th step. Its KV waits in host memory."""

    env: ClassVar = {
        **PairBase.env,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "20",
    }
    plugins: ClassVar = () if torch.cuda.is_available() else (nothing_to_synchronize,)


class Optimistic(PdServing):
    prefill_flags: ClassVar = {"optimistic_prefill_attempts": 3, "log_level": "info"}


class Yielding(Optimistic):
    """Half of the prefills that begin too early give their slots to others, and begin again."""

    prefill_env: ClassVar = {"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.5"}


@long_form
@pytest.mark.skipif(not release().has_own_canary, reason="this release has none")
class TestOptimisticPrefill(PairBase):
    """Prefills begin before the decode server is ready."""

    transport: ClassVar = Optimistic


@long_form
@pytest.mark.skipif(not release().has_own_canary, reason="this release has none")
class TestYieldingPrefill(PairBase):
    """What such a prefill has read is left in no answer. So nobody ends for it."""

    transport: ClassVar = Yielding
    spares: ClassVar = True

    def test_exactly_the_readers_of_damage_end(self) -> None:
        super().test_exactly_the_readers_of_damage_end()
        assert "optimistic prefill yielded" in self.serving.prefill.stderr


@long_form
@pytest.mark.skipif(not release().has_own_canary, reason="this release has none")
class TestAllocationAfterThePrefill(PairBase):
    """The decode server has slots for a prompt once all of its KV is computed."""

    transport: ClassVar = AfterThePrefill


class Caching(PdServing):
    decode_flags: ClassVar = {"disaggregation_decode_enable_radix_cache": True}


@long_form
class TestPrefixCache(PairBase):
    """On the decode server, too. Requests that are being received hold prefixes of it."""

    transport: ClassVar = Caching
    pool: ClassVar = PairPool(has_cache=True)


TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@long_form
class TestTwoRanks(PairBase):
    flags: ClassVar = {**PairBase.flags, "tp_size": 2}
    env: ClassVar = {**PairBase.env, **TWO_RANKS}
    pool: ClassVar = PairPool(size=64, ranks=((1,), (0,), (0, 1)))
    reason_of_prefill: ClassVar = ""  # rank 0 answers, and may have received its part in time


class TwoToOne(PdServing):
    prefill_flags: ClassVar = {"tp_size": 2}
    prefill_env: ClassVar = TWO_RANKS


@long_form
class TestTwoRanksPrefill(PairBase):
    """One of them has damage. Nothing of the other one may arrive after the decode server has ended the request."""

    transport: ClassVar = TwoToOne
    pool: ClassVar = PairPool(size=64, on_decode=False, ranks=((1,), (0,), (1,), (0,)))


@long_form
class TestPages(PairBase):
    flags: ClassVar = {**PairBase.flags, "page_size": consts.PAGE_SIZE}
    # SGLang's page allocator is a Triton kernel.
    env: ClassVar = {**PairBase.env, **(INTERPRETED if ON_CPU else {})}
    plugins: ClassVar = (quick_interpreter,) if ON_CPU else ()


@long_form
class TestPagesOnTwoRanks(TestPages):
    """After a wrong row, ranks must have as many free pages."""

    flags: ClassVar = {**TestPages.flags, "tp_size": 2}
    env: ClassVar = {**TestPages.env, **TWO_RANKS}
    pool: ClassVar = PairPool(size=64, ranks=((1,), (0,), (0, 1)))
    reason_of_prefill: ClassVar = ""


@long_form
class TestSlidingWindow(PairBase):
    mode_name = "swa"
    # By default SGLang reserves so many slots for answers that requests decode one after the other.
    flags: ClassVar = {**PairBase.flags, "num_reserved_decode_tokens": 16}


@long_form
class TestMla(PairBase):
    mode_name = "mla"
    pool: ClassVar = PairPool(half="K", size=64)


@long_form
class TestMlaTwoRanksPrefill(PairBase):
    """One of them sends nothing. What it finds ends the request all the same."""

    mode_name = "mla"
    transport: ClassVar = TwoToOne
    pool: ClassVar = PairPool(
        half="K", size=64, on_decode=False, ranks=((1,), (0,), (1,), (0,), (0,), (1,), (0,), (1,))
    )


class ReportingDecode(PdServing):
    decode_env: ClassVar = {"SGLANG_KV_CANARY_ACTION": "report"}


@long_form
class TestReportingDecode(PairBase):
    """It heeds what the prefill server says, and would serve what it finds itself."""

    transport: ClassVar = ReportingDecode
    pool: ClassVar = PairPool(on_decode=False)


class UncheckedDecode(PdServing):
    decode_flags: ClassVar = {"kv_canary": "none", "kv_canary_real_data": "none"}


@long_form
@pytest.mark.skipif(
    PdServing.backend == "nixl",
    reason="NIXL of 0.5.12.post1 tells that decode server nothing; lifted by Mooncake",
)
class TestUncheckedDecode(PairBase):
    """The transport itself fails what a decode server without a canary must not use."""

    transport: ClassVar = UncheckedDecode
    pool: ClassVar = PairPool(on_decode=False)
    reason: ClassVar = "Failed to get kvcache from prefill instance"
    reason_of_prefill: ClassVar = ""

    def settle(self) -> dict[str, Any]:
        """The decode server takes no commands."""
        return self.settle_prefill()

    def violations(self) -> list[dict[str, Any]]:
        self.settle()
        return self.serving.prefill.events("violation")


@long_form
class TestNixl(PairBase):
    transport: ClassVar = OverNixl


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
