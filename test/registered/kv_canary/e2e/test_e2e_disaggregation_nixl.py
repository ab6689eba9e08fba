"""Prefill-decode disaggregation over NIXL itself, between servers of this machine: what the transport decides."""

import sys
from typing import ClassVar

import pytest

import sglang.version
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases, refused_on_newer_releases
from sglang_kv_canary_rigs.pd_pairs import (
    HEALTH,
    DamagedPair,
    DamagedWindow,
    EndsDamaged,
    OneSidedDecode,
    OneSidedPrefill,
    UncheckedDecode,
    UncheckedPrefill,
)
from sglang_kv_canary_rigs.pd_serving import OverNixl

if release().transfers is None or sglang.version.__version__ == "0.5.22":
    reason = "refused by name on this release; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=50, suite="stage-a-test-cpu")


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
