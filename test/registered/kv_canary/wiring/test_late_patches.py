"""A hooked function that another package replaces later: no start, and no healthy server."""

import random
import sys
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.runner.manager import MOST_UNSEEN
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
    """The hook that is lost is the one that drives the health check."""

    plugins: ClassVar = (replaces_the_forward_while_busy,)

    def test_a_forward_that_is_lost_is_unhealthy_before_the_server_idles(self) -> None:
        steps = RESULTS_BEFORE + MOST_UNSEEN + 20
        self.generate("busy", random_tokens(random.Random(0), 30), steps)
        said = [event["problems"] for event in self.serving.events("health")]
        (found,) = [problems for problems in said if "no forward was seen" in "".join(problems)]
        assert found[0] == f"no forward was seen before the last {MOST_UNSEEN + 1} results"
        assert FORWARD in found[1]
        assert f"unhealthy on the target runner: {found[0]}" in self.serving.stderr
        state = self._state()
        assert (state["checking"], state["healthy"]) == (False, False)
        (stopped,) = self.serving.events("checking")
        assert f"got {MOST_UNSEEN + 1} results without one" in stopped["reason"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
