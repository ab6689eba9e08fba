"""SGLANG_KV_CANARY_ACTION=abort: exactly the requests that read damage end, and the others are answered as ever."""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary_rigs.containment_traffic import (
    ENV,
    FLAGS,
    KINDS_OF_FAULTS,
    Answer,
    Balance,
    Round,
    rounds,
    serve,
)

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

ROUNDS = int(os.environ.get("KV_CANARY_TEST_CONTAINMENT_ROUNDS", KINDS_OF_FAULTS))


class ContainmentBase(CanaryE2EBase):
    """The same rounds without faults, on the same server, give the right answers. Nobody ends in them."""

    mode_name = "attentive"
    flags: ClassVar = FLAGS
    env: ClassVar = ENV
    count: ClassVar[int] = ROUNDS

    def actions(self) -> list[dict[str, Any]]:
        self.settle()
        return self.serving.events("containment")

    def serve_clean(self, plan: list[Round]) -> list[dict[str, Answer]]:
        async def all_of_them() -> list[dict[str, Answer]]:
            return [await serve(self.serving, each, faulty=False) for each in plan]

        answers = self.run(all_of_them())
        assert {a.error for each in answers for a in each.values()} == {None}
        assert self.actions() == []
        assert self.violations() == []
        assert self.run(self.serving.flush())
        return answers

    def test_exactly_the_readers_of_damage_end(self) -> None:
        plan = list(rounds(self.count))
        clean, balance = self.serve_clean(plan), Balance()
        self.expect_violations()
        for each, right in zip(plan, clean, strict=True):
            before = len(self.actions())
            answers = self.run(serve(self.serving, each, faulty=True))
            balance.add(each, right, answers, self.actions()[before:])
        assert balance.problems == []
        assert balance.ended >= self.count
        assert balance.ended + balance.right + balance.answered == 6 * self.count
        assert max(balance.tokens_left) <= 2  # of 14 to 19
        # Idle with SGLang's leak check on, and as right as before.
        assert self.run(self.serving.flush())
        assert self.run(serve(self.serving, plan[0], faulty=False)) == clean[0]
        assert self.serving.events("internal_error") == []


class TestContainment(ContainmentBase):
    pass


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
