"""Prefill-decode disaggregation over NIXL itself, between servers of this machine: what the transport decides."""

import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.pd_pairs import (
    DamagedPair,
    DamagedWindow,
    EndsDamaged,
    OneSidedDecode,
    OneSidedPrefill,
    UncheckedDecode,
    UncheckedPrefill,
)
from sglang_kv_canary_rigs.pd_serving import OverNixl

if release().transfers is None or "nixl" not in release().transfers.transports:
    reason = "refused by name on this release; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=50, suite="stage-a-test-cpu")


class TestEnded(DamagedPair, EndsDamaged):
    """The request whose KV arrives damaged is ended, and no other."""

    transport: ClassVar = OverNixl
    requests: ClassVar[int] = 20

    def test_the_damaged_request_alone_is_ended(self) -> None:
        self.damaged_request_alone_is_ended("drop_all")


class TestSwa(DamagedWindow):
    transport: ClassVar = OverNixl
    requests: ClassVar[int] = 20


class UncheckedPrefillOverNixl(OverNixl, UncheckedPrefill): ...


class UncheckedDecodeOverNixl(OverNixl, UncheckedDecode): ...


class TestUncheckedPrefill(OneSidedPrefill):
    transport: ClassVar = UncheckedPrefillOverNixl


class TestUncheckedDecode(OneSidedDecode):
    transport: ClassVar = UncheckedDecodeOverNixl


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
