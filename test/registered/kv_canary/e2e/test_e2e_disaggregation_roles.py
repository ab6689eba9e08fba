"""A prefill and a decode server exchange their roles while they run (`--enable-pd-role-switch`)."""

import random
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import CanaryServer, consts
from sglang_kv_canary.testing.serving import Injection, free_port
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.pd_pairs import BY_HAND, LOG_OR_RAISE, LONG, SWEPT, Pair, requests
from sglang_kv_canary_rigs.pd_serving import PdServing, transit_faults
from sglang_kv_canary_rigs.volume import volume

if not release().has_own_canary or release().transfers is None:
    reason = "this release has no change of role; lifted by make test SGLANG=0.5.23"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

REQUESTS = requests(volume(12, 40))


class Switching(PdServing):
    """Requests go to the servers by their present roles."""

    # With a prefix cache, SGLang leaks slots of aborted requests once a prefill server decodes, and stops in the end.
    prefill_flags: ClassVar = {"enable_pd_role_switch": True, "disable_radix_cache": True}
    decode_flags: ClassVar = prefill_flags

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.other_port = free_port()  # each server has a bootstrap server of its own
        self.server_args["disaggregation_bootstrap_port"] = self.other_port
        self.prefills: CanaryServer = self.prefill
        self.decodes: CanaryServer = self

    def switch(self) -> None:
        """Exchange the roles. Both servers must be idle."""
        for server, role in ((self.decodes, "prefill"), (self.prefills, "decode")):
            # SGLang asks how much memory the graphs of decodes will need, which it captures only now.
            body = {"new_role": role, "decode_cuda_graph_memory_gb": 0}
            answer = server.post("/pd_role_switch", body)
            assert answer["success"], answer
        self.prefills, self.decodes = self.decodes, self.prefills
        self.bootstrap_port, self.other_port = self.other_port, self.bootstrap_port

    async def ask_both(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        answers = await super().ask_both(body)
        return answers if self.decodes is self else answers[::-1]

    # Of the present decode server

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return CanaryServer.events(self.decodes, kind)

    def send(self, fault: str, *args: Any, **more: Any) -> Injection:
        return CanaryServer.send(self.decodes, fault, *args, **more)


@BY_HAND
@pytest.mark.skipif(PdServing.backend == "nixl", reason="refused by SGLang over NIXL")
class TestChangeOfRole(Pair):
    """First clean traffic, then a fault, in each of three turns. The servers exchange their roles in between."""

    transport: ClassVar = Switching
    flags: ClassVar = {**SWEPT, "kv_canary": LOG_OR_RAISE}
    plugins: ClassVar = (transit_faults,)

    @pytest.mark.parametrize("turn", range(3))
    def test_clean(self, turn: int) -> None:
        if turn:
            self.serving.switch()
            self.forget()
        before = self.checked_by_decodes()
        report = self.serve(TrafficShape(REQUESTS, seed=turn, flushes=1, name=f"turn-{turn}"))
        assert report.requests == REQUESTS
        self.assert_no_violations()
        self.assert_healthy()
        self.assert_all_checked()
        assert self.checked_by_decodes() > before
        if LONG:
            return
        self.expect_violations()
        name = f"damaged-{turn}"
        with self.serving.damaging("reverse_slots"):
            self.ask(name, random_tokens(random.Random(turn), consts.CHUNKED_PREFILL_SIZE + 7))
        event = self.assert_violation("POSITION", reader=name)
        assert event["reader"]["mode"] == "ARRIVAL"
        assert {e["reader"]["request_id"] for e in self.violations()} == {name}

    def forget(self) -> None:
        """What was found before."""
        type(self)._seen = len(self.serving.events("violation"))
        type(self)._seen_on_prefill = 0
        self.found_on_prefill()

    def found_on_prefill(self) -> list[dict[str, Any]]:
        found = CanaryServer.events(self.serving.prefills, "violation")[self._seen_on_prefill :]
        type(self)._seen_on_prefill += len(found)
        return found

    def checked_by_decodes(self) -> int:
        """0 before its first step in this role."""
        counters = self.settle()
        return counters["HEAD_K_FULL"]["checked"] if counters else 0


@BY_HAND
@pytest.mark.skipif(PdServing.backend == "nixl", reason="refused by SGLang over NIXL")
class TestHybrid(TestChangeOfRole):
    mode_name: ClassVar = "hybrid"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
