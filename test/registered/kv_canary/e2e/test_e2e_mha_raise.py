"""RAISE mode and the sweep over HTTP: clean requests raise no alarm; one flipped byte ends the server with a report."""

import random
import socket
import sys
from importlib.metadata import version
from typing import Any, ClassVar

import aiohttp
import psutil
import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.reports.story import report_of
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary_rigs.volume import volume
from sglang_kv_canary_rigs.waiting_content import content_waits

register_cpu_ci(est_time=80, suite="stage-a-test-cpu")
register_cuda_ci(est_time=120, suite="stage-b-test-1-gpu-small")

REQUESTS = 1000 if torch.cuda.is_available() else volume(140, 400)


class TestMHARaise(CanaryE2EBase):
    """The tests run in this order; the last one ends the server."""

    ends_server = True
    plugins: ClassVar = (content_waits,)
    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        "log_level": "warning",
    }
    env: ClassVar = {
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",  # SGLang's own default
        # Every few steps SGLang takes a request back, and prefills prompt and answer again later. It keeps the last
        # one that runs, so the fault below always finds its victim.
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "10",
        "SGLANG_KV_CANARY_SWEEP_REPORT_EVERY_S": "1",
        "SGLANG_KV_CANARY_SWEEP_BUDGET_SLOTS": "300",  # several chunks a pass
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20",
    }

    def test_clean_requests_raise_no_alarm(self) -> None:
        """Inserts, evictions, splits, aborts, retractions and flushes, all under the sweep."""
        report = self.serve(TrafficShape(REQUESTS, seed=7, abort_share=0.15))
        assert (report.requests, report.flushes) == (REQUESTS, 3)
        assert report.aborts > REQUESTS / 20
        assert self.serving.stderr.count("Testing retraction") > 5
        self.assert_no_violations()
        self.assert_healthy()
        counters = self.settle()
        heads, tails, sweeps = (self.mode.tags(side) for side in ("HEAD", "TAIL", "SWEEP"))
        assert sorted(counters) == sorted(heads + tails + sweeps)
        for tag in heads + tails:
            assert counters[tag]["checked"] == counters[tag]["eligible"] > 100 * REQUESTS, tag
            assert counters[tag]["written"] > 30 * REQUESTS, tag
        for tag in tails:
            assert counters[tag]["content_checked"] == counters[tag]["checked"], tag
        for tag in sweeps:
            assert counters[tag]["checked"] > 1000, tag
            assert counters[tag]["content_checked"] > 1000, tag
        passes = self.serving.wait_for(self._passes, "more than 5 sweep passes are reported")
        assert passes[-1]["passes"] > 5
        assert not any(event["findings"] for event in passes)

    def _passes(self) -> list[dict[str, Any]] | None:
        """The events of passes, which go on while the server is idle. None: at most 5 passes are reported yet."""
        events = self.serving.events("sweep_pass")
        return events if events and events[-1]["passes"] > 5 else None

    def test_server_info_shows_the_flags_and_what_is_active(self) -> None:
        info = self.serving.get("/server_info")
        assert (info["kv_canary"], info["kv_canary_real_data"]) == ("raise", "all")
        assert info["kv_canary_sweep_interval"] == 1
        (active,) = info["kv_canary_active"]
        assert (active["mode"], active["pools"]) == ("raise", ["FULL"])
        (event,) = self.serving.events("active")
        assert active.items() <= event.items()
        assert event["host"] == socket.gethostname()
        parents = psutil.Process(event["pid"]).parents()
        assert self.serving.process.pid in [process.pid for process in parents]
        assert event["model"] == self.serving.server_args["model_path"]
        assert event["sglang_version"] == version("sglang")
        assert event["canary_version"] == version("sglang-kv-canary")

    def test_violation_ends_the_server_and_is_the_last_word(self) -> None:
        # A slot of the answer: the prefix cache has only the prompt yet, so the sweep does not report it, too.
        at = {"min_prefix": 40, "position": 35}
        self.inject("flip_bytes", mode="DECODE", half="V", source=1, **at)
        prompt = random_tokens(random.Random("last"), 30)
        with pytest.raises(aiohttp.ClientError):
            self.generate("victim", prompt, 64)
        assert self.serving.process.wait(consts.PROCESS_TIMEOUT_S) != 0

        violations = self.serving.events("violation")
        assert [v["reasons"] for v in violations] == [["CONTENT"]]
        assert violations[0]["reader"]["request_id"] == "victim"
        report = report_of(violations[0], self.serving.events("cause"))
        assert self.serving.stderr.rstrip().endswith(report)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
