"""A hooked function that another package replaces later: no start, and no healthy server."""

import random
import sys
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import MODES, CanaryServer
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary_rigs.late_patches import (
    FORWARD,
    REPLACED,
    RESULTS_BEFORE,
    replaces_at_a_flush,
    replaces_at_the_start,
    replaces_the_forward_while_busy,
)

register_cpu_ci(est_time=25, suite="stage-a-test-cpu")

PERIOD = 20


def test_a_hook_that_is_lost_during_the_start_is_refused() -> None:
    server = CanaryServer(MODES["mha"], {"kv_canary": "log"}, plugins=(replaces_at_the_start,))
    with pytest.raises(RuntimeError, match="the server ended") as ended, server:
        pass
    assert f"did not apply the hooks on {REPLACED}. Not protected: slots" in str(ended.value)


class _Monitored(CanaryE2EBase):
    def _state(self) -> dict[str, Any]:
        """As a monitor without Prometheus sees it."""
        (replica,) = self.serving.get("/server_info")["internal_states"]
        (target,) = replica["kv_canary"]
        return target


class TestWhileServing(_Monitored):
    plugins: ClassVar = (replaces_at_a_flush,)
    env: ClassVar = {"SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": str(PERIOD)}

    def test_a_hook_that_is_lost_is_unhealthy(self) -> None:
        self._answer("before")
        assert all(event["healthy"] for event in self.serving.events("health"))
        state = self._state()
        assert state["healthy"]
        assert state["settings"]["SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL"] == str(PERIOD)
        self.run(self.serving.flush())
        self._answer("after")
        health = self._last_health()
        assert not health["healthy"]
        (problem,) = health["problems"]
        assert REPLACED in problem
        assert "slots that are read after they were freed" in problem
        assert REPLACED in self.serving.stderr
        state = self._state()
        assert (state["checking"], state["healthy"]) == (True, False)

    def _answer(self, name: str) -> None:
        self.generate(name, random_tokens(random.Random(name), 30), 3 * PERIOD)
        self.settle()

    def _last_health(self) -> dict[str, Any]:
        return self.serving.events("health")[-1]


class TestWhileBusy(_Monitored):
    """The hook that is lost is the one before each forward. `model.forward` itself is still bracketed."""

    plugins: ClassVar = (replaces_the_forward_while_busy,)
    flags: ClassVar = {"kv_canary": "log", "kv_canary_real_data": "all", "max_total_tokens": 600}

    def test_a_forward_that_is_lost_stops_the_checks_before_they_are_wrong(self) -> None:
        self.generate("busy", random_tokens(random.Random(0), 30), RESULTS_BEFORE + 2)
        (stopped,) = self.serving.events("checking")
        assert (
            "model.forward ran outside of a forward that the canary has seen" in stopped["reason"]
        )
        found = self.serving.events("health")[-1]["problems"]
        assert any(FORWARD in problem for problem in found)
        assert "To resume, restart the server" in self.serving.stderr
        state = self._state()
        assert (state["checking"], state["healthy"]) == (False, False)
        # The pool is used again and again, and prefixes are read
        prompts = [random_tokens(random.Random(i + 1), 220) for i in range(6)]
        self.generate_together([(f"reused{i}", prompt, 4) for i, prompt in enumerate(prompts)])
        self.settle()
        self.generate("prefix", prompts[5] + [1, 2, 3], 3)
        assert self.run(self.serving.flush())
        self.generate("flushed", prompts[0], 3)
        self.assert_no_violations()
        assert len(self.serving.events("checking")) == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
