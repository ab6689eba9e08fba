"""SGLANG_KV_CANARY_ACTION=abort on a prefill and a decode server: exactly the requests that read damage end."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.containment_serving import LONG, ROUNDS, ContainmentBase
from sglang_kv_canary_rigs.containment_traffic import (
    ENV,
    FLAGS,
    KINDS_OF_PAIR_FAULTS,
    PairPool,
    servers,
)
from sglang_kv_canary_rigs.on_releases import refused_on_newer_releases
from sglang_kv_canary_rigs.pd_serving import ServesPair

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=45, suite="stage-a-test-cpu")

long_form = pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_CONTAINMENT_ROUNDS")


class PairBase(ServesPair, ContainmentBase):
    """Both servers' leak checks stay on. Each error names the canary, whichever server has found the damage."""

    flags: ClassVar = {**FLAGS, "log_level": "warning"}
    env: ClassVar = {
        **ENV,
        # A slot that is lost to one side would hold the other one up.
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20",
    }
    pool: ClassVar = PairPool()
    count: ClassVar[int] = ROUNDS if LONG else KINDS_OF_PAIR_FAULTS

    def teardown_method(self) -> None:
        ContainmentBase.teardown_method(self)

    def settle(self) -> dict[str, Any]:
        for _ in range(2):
            ranks = range(self.serving.prefill.server_args.get("tp_size", 1))
            for answer in [self.serving.prefill.send("counters", rank) for rank in ranks]:
                answer.answer()
        return super().settle()

    def violations(self) -> list[dict[str, Any]]:
        return [*super().violations(), *self.serving.prefill.events("violation")]

    def assert_nothing_waits(self) -> None:
        assert self.serving.alive, self.serving.stderr
        for server in servers(self.serving):
            assert server.events("internal_error") == []


@refused_on_newer_releases
class TestPair(PairBase):
    def test_exactly_the_readers_of_damage_end(self) -> None:
        super().test_exactly_the_readers_of_damage_end()
        self.assert_nothing_waits()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
