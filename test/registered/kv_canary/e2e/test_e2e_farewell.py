"""SIGTERM to a real server: its scheduler process, which SGLang kills, has named every finding before."""

import os
import random
import signal
import sys
import time
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import CanaryServer, consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary_rigs.quiet_idle import names_nothing_while_idle
from sglang_kv_canary_rigs.volume import FULL_VOLUME
from sglang_kv_canary_rigs.warm import FreshServer

register_cpu_ci(est_time=50, suite="stage-a-test-cpu")

DAMAGED = 25  # more than are named at once
LINE = "kv_canary violation: launch_tag=TAIL_K_FULL fail_reason=CONTENT "


class TestSigterm(CanaryE2EBase):
    transport = FreshServer if FULL_VOLUME else CanaryServer
    ends_server = True
    plugins: ClassVar = (names_nothing_while_idle,)
    # Findings are shown at every level.
    flags: ClassVar = {**CanaryE2EBase.flags, "log_level": "critical"}
    env: ClassVar = {"SGLANG_KV_CANARY_LOG_EVERY_S": "1e9"}

    def test_everything_that_waits_is_named_before_a_paused_server_ends(self) -> None:
        prompt = random_tokens(random.Random("prompt"), 60)
        self.generate("writer", prompt, 4)
        for position in range(DAMAGED):
            self.inject("flip_bytes", cached=prompt, position=position).answer()
        self.generate("reader\n\x1b[2Jkv-canary healthy", [*prompt, 7], 4)
        found = self.violations()
        assert {event["cause"] for event in found} == {*range(1, DAMAGED + 1)}
        # The plugin works: SGLang, too, idles for seconds between SIGTERM and its end.
        time.sleep(1.5)
        assert self.serving.stderr.count(LINE) == 20
        self.serving.post("/pause_generation", {"mode": "in_place"})
        os.kill(self.serving.process.pid, signal.SIGTERM)
        self.serving.process.wait(consts.PROCESS_TIMEOUT_S)
        assert self.serving.stderr.count(LINE) == DAMAGED
        assert "\x1b" not in self.serving.stderr
        assert "\nkv-canary healthy" not in self.serving.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
