"""Prefill-decode disaggregation over NIXL itself, between servers of this machine: what the transport decides."""

import random
import sys
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.early_chunks import EARLY, early_chunks, went_early
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases, refused_on_newer_releases
from sglang_kv_canary_rigs.pd_pairs import (
    HEALTH,
    CleanPair,
    DamagedPair,
    DamagedWindow,
    EndsDamaged,
    OneSidedDecode,
    OneSidedPrefill,
    OverAPrefixCache,
    Pair,
    UncheckedDecode,
    UncheckedPrefill,
)
from sglang_kv_canary_rigs.pd_serving import (
    CachingServing,
    OverMooncake,
    OverNixl,
    transit_faults,
)

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")


sends_early = pytest.mark.skipif(
    not release().has_own_canary, reason="this release sends no chunk early; lifted by make test"
)
IN_TIME = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the fault is in memory of the host; lifted on a CPU"
)


class CachingOverNixl(OverNixl, CachingServing): ...


class TestPrefixCacheOnTheDecodeServer(OverAPrefixCache, CleanPair):
    transport: ClassVar = CachingOverNixl
    plugins: ClassVar = (transit_faults, early_chunks)

    @sends_early
    @IN_TIME
    def test_kv_that_goes_before_its_forward_has_written_it(self) -> None:
        """SGLang drops the event of that forward on the way to NIXL. Records wait for it, so bytes alone are wrong."""
        self.expect_violations()
        size = consts.CHUNKED_PREFILL_SIZE
        with self.serving.damaging(EARLY):
            self.ask("early", random_tokens(random.Random("early"), size + 7))
        assert went_early(self.serving)
        event = self.assert_violation("CONTENT", reader="early")
        assert event["reader"]["mode"] == "ARRIVAL"
        on_arrival = [e for e in self.violations() if e["reader"]["mode"] == "ARRIVAL"]
        assert {tuple(e["reasons"]) for e in on_arrival} == {("CONTENT",)}
        assert {e["stored_position"] for e in on_arrival} == set(range(size))


@sends_early
@IN_TIME
class TestEarlyChunksOverMooncake(Pair):
    """There SGLang waits for the event before it reads KV."""

    transport: ClassVar = OverMooncake
    plugins: ClassVar = (early_chunks,)

    def test_kv_does_not_go_before_its_forward_has_written_it(self) -> None:
        prompt = random_tokens(random.Random("early"), consts.CHUNKED_PREFILL_SIZE + 7)
        with self.serving.damaging(EARLY):
            answer = self.ask("early", prompt)
        assert went_early(self.serving)
        assert self.run(self.serving.flush())
        assert self.ask("again", prompt) == answer
        self.assert_clean_and_all_checked()


@long_on_newer_releases
class TestMha(EndsDamaged, DamagedPair):
    """Where the release can, the request whose KV arrives damaged is ended, and no other."""

    transport: ClassVar = OverNixl
    env: ClassVar = HEALTH if release().has_own_canary else EndsDamaged.env
    requests: ClassVar[int] = 16

    @refused_on_newer_releases
    def test_the_damaged_request_alone_is_ended(self) -> None:
        self.damaged_request_alone_is_ended("drop_all", 150)


@long_on_newer_releases
class TestSwa(DamagedWindow):
    transport: ClassVar = OverNixl
    requests: ClassVar[int] = 12


class UncheckedPrefillOverNixl(OverNixl, UncheckedPrefill): ...


class UncheckedDecodeOverNixl(OverNixl, UncheckedDecode): ...


@long_on_newer_releases
class TestUncheckedPrefill(OneSidedPrefill):
    transport: ClassVar = UncheckedPrefillOverNixl


@long_on_newer_releases
class TestUncheckedDecode(OneSidedDecode):
    transport: ClassVar = UncheckedDecodeOverNixl


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
