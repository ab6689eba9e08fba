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
    REPLACED,
    replaces_at_a_flush,
    replaces_at_the_start,
)

register_cpu_ci(est_time=25, suite="stage-a-test-cpu")

PERIOD = 20


def test_a_hook_that_is_lost_during_the_start_is_refused() -> None:
    server = CanaryServer(MODES["mha"], {"kv_canary": "log"}, plugins=(replaces_at_the_start,))
    with pytest.raises(RuntimeError, match="the server ended") as ended, server:
        pass
    assert f"did not apply the hooks on {REPLACED}. Not protected: slots" in str(ended.value)


class TestWhileServing(CanaryE2EBase):
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

    def _state(self) -> dict[str, Any]:
        """As a monitor without Prometheus sees it."""
        (replica,) = self.serving.get("/server_info")["internal_states"]
        (target,) = replica["kv_canary"]
        return target

    def _last_health(self) -> dict[str, Any]:
        return self.serving.events("health")[-1]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
