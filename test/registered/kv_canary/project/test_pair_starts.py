"""Where one server of a pair does not start, no other one stays behind."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import CanaryServer
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary_rigs.pd_serving import PdServing

register_cpu_ci(est_time=2, suite="stage-a-test-cpu")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_that_does_not_start_ends_the_other_one(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    def popen(*_: Any, **__: Any) -> subprocess.Popen:
        return subprocess.Popen(["sleep", "600"])

    def wait(server: CanaryServer) -> None:
        if server.server_args["disaggregation_mode"] == role:
            raise TimeoutError("the server was not ready")

    monkeypatch.setattr(CanaryServer, "_wait_until_ready", wait)
    pair = PdServing(MODES["mha"])
    for server in (pair, pair.prefill):
        monkeypatch.setattr(server, "popen", popen)
    with pytest.raises(TimeoutError, match="not ready"):
        pair.__enter__()
    left = [server.process for server in (pair, pair.prefill) if server.process.poll() is None]
    for process in left:
        process.kill()
    assert left == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
