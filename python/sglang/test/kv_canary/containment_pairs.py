"""A prefill and a decode server on which requests that read damage end."""

from __future__ import annotations

from typing import Any, ClassVar

from .containment_serving import LONG, ROUNDS, ContainmentBase
from .containment_traffic import ENV, FLAGS, KINDS_OF_PAIR_FAULTS, PairPool, servers
from .pd_serving import ServesPair

__all__ = ["PairBase"]


class PairBase(ServesPair, ContainmentBase):
    """Both servers' leak checks stay on. Each error names the canary, whichever server has found the damage."""

    flags: ClassVar = {**FLAGS, "log_level": "warning"}
    env: ClassVar = {
        **ENV,
        # A slot that is lost to one side would hold the other one up. A request on a busy machine can take 20 s.
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "100",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "100",
    }
    pool: ClassVar = PairPool()
    reason_of_prefill: ClassVar = "kv-canary: on the prefill server"
    count: ClassVar[int] = ROUNDS if LONG else KINDS_OF_PAIR_FAULTS

    def teardown_method(self) -> None:
        ContainmentBase.teardown_method(self)

    def settle_prefill(self) -> dict[str, Any]:
        prefill = self.serving.prefill
        for _ in range(2):
            sent = [prefill.send("counters", **rank) for rank in prefill.ranks]
            answers = [each.answer() for each in sent]
        return answers[0]["counters"]

    def settle(self) -> dict[str, Any]:
        self.settle_prefill()
        return super().settle()

    def violations(self) -> list[dict[str, Any]]:
        return [*super().violations(), *self.serving.prefill.events("violation")]

    def test_exactly_the_readers_of_damage_end(self) -> None:
        super().test_exactly_the_readers_of_damage_end()
        assert self.serving.alive, self.serving.stderr
        errors = [e for s in servers(self.serving) for e in s.events("internal_error")]
        assert errors == [], errors
        # What a prefill server's forwards find is known before the KV has gone.
        actions = self.serving.prefill.events("containment")
        late = [e for e in actions if e["rank"] == 0 and e["answered"]]
        assert late == [], late
