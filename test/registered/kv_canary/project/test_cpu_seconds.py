"""CPU seconds of a test: its own, and those of what it has started."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.checkout import REPO

register_cpu_ci(est_time=3, suite="stage-a-test-cpu")

BUSY = "import time; begin = time.process_time()\nwhile time.process_time() - begin < 0.3: pass\n"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {BUSY!r}])"


def test_a_process_counts_with_all_that_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPO / "tools")
    from cpu_seconds import seconds_of_tree, sums

    own, below = seconds_of_tree(os.getpid())
    begin = time.process_time()
    exec(BUSY)
    spent = time.process_time() - begin
    running = subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT + "; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 30
        while seconds_of_tree(os.getpid())[1] - below < 0.3 and time.monotonic() < deadline:
            time.sleep(0.05)
        own_after, below_after = seconds_of_tree(os.getpid())
    finally:
        running.communicate()
    assert own_after - own == pytest.approx(spent, abs=0.3)
    assert 0.3 <= below_after - below < 0.6
    lines = [{"test": f"{name}::x", "own": 1.0, "below": 0.5} for name in ("a.py", "b.py", "a.py")]
    assert sums(lines) == [("a.py", 3.0), ("b.py", 1.5), ("all", 4.5)]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
