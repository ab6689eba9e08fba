"""A server on which requests that read damage end: rounds with faults, and the same ones without."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from sglang_kv_canary.testing.e2e import CanaryE2EBase

from .containment_traffic import (
    ENV,
    FLAGS,
    KINDS_OF_FAULTS,
    Answer,
    Balance,
    Pool,
    Round,
    differing,
    rounds,
    serve,
    servers,
)

__all__ = ["LONG", "ROUNDS", "ContainmentBase"]

# The long form: KV_CANARY_TEST_CONTAINMENT_ROUNDS=100
LONG = "KV_CANARY_TEST_CONTAINMENT_ROUNDS" in os.environ
ROUNDS = int(os.environ.get("KV_CANARY_TEST_CONTAINMENT_ROUNDS", KINDS_OF_FAULTS))


class ContainmentBase(CanaryE2EBase):
    """The same rounds without faults, on the same server, give the right answers. Nobody ends in them."""

    mode_name = "attentive"
    flags: ClassVar = FLAGS
    env: ClassVar = ENV
    pool: ClassVar = Pool()
    count: ClassVar[int] = ROUNDS
    reason: ClassVar[str] = "kv-canary"  # in the error of each request that ends
    reason_of_prefill: ClassVar[str] = ""  # in that of each one that a prefill server has ended
    spares: ClassVar[bool] = False  # see Balance
    ties: ClassVar[int | None] = None  # at most so many; None: as many as there are

    def actions(self) -> list[dict[str, Any]]:
        self.settle()
        return [each for server in servers(self.serving) for each in server.events("containment")]

    def serve_clean(self, plan: list[Round]) -> list[dict[str, Answer]]:
        async def all_of_them() -> list[dict[str, Answer]]:
            return [await serve(self.serving, each, faulty=False) for each in plan]

        answers = self.run(all_of_them())
        assert {a.error for each in answers for a in each.values()} == {None}
        assert self.actions() == []
        assert self.violations() == []
        self.forget_everything()
        return answers

    def forget_everything(self) -> None:
        assert self.run(self.serving.flush())

    def test_exactly_the_readers_of_damage_end(self) -> None:
        plan = list(rounds(self.count, pool=self.pool))
        clean, balance = self.serve_clean(plan), Balance(spares=self.spares, reason=self.reason)
        balance.reason_of_prefill = self.reason_of_prefill
        self.expect_violations()
        for each, right in zip(plan, clean, strict=True):
            answers = self.run(serve(self.serving, each, faulty=True))
            self.settle()
            self.run(balance.add(self.serving, each, right, answers))
        print(balance)  # for the log of a long form
        if balance.problems:
            print(*self.serving.events("containment"), *self.violations(), sep="\n")
        assert balance.problems == []
        assert self.ties is None or balance.ties <= self.ties
        assert balance.ended + balance.answered + balance.spared >= self.count
        assert max(balance.tokens_left, default=0) <= 2  # of 14 to 19
        # Idle with SGLang's leak check on, and as right as before.
        assert self.run(self.serving.flush())
        answers = self.run(serve(self.serving, plan[0], faulty=False))
        assert self.run(differing(self.serving, plan[0], answers, clean[0])) == []
        errors = self.serving.events("internal_error")
        assert errors == [], errors


class ServesAllAgain:
    """Beside a ContainmentBase, before it."""

    plan: list[Round]
    clean: list[dict[str, Answer]]

    def serve_clean(self, plan: list[Round]) -> list[dict[str, Answer]]:
        self.plan, self.clean = plan, super().serve_clean(plan)
        return self.clean

    def test_exactly_the_readers_of_damage_end(self) -> None:
        """Nothing wrong is left in any tier: without faults, all rounds give the right answers."""
        super().test_exactly_the_readers_of_damage_end()
        for each, right in zip(self.plan, self.clean, strict=True):
            answers = self.run(serve(self.serving, each, faulty=False))
            assert self.run(differing(self.serving, each, answers, right)) == []
