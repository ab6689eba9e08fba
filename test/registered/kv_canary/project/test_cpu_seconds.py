"""CPU seconds of a test: its own, and those of what it has started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.checkout import REPO

register_cpu_ci(est_time=3, suite="stage-a-test-cpu")

BUSY = "import time; begin = time.process_time()\nwhile time.process_time() - begin < 0.3: pass\n"
# A tree of its own: what this process has started before may end meanwhile and takes its seconds along.
PARENT = f"""{BUSY}
import subprocess, sys
subprocess.run([sys.executable, "-S", "-c", {BUSY!r}])
print("done", flush=True)
sys.stdin.read()
"""


def test_a_process_counts_with_all_that_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPO / "tools")
    from cpu_seconds import seconds_of_tree, sums

    root = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', sys.argv[1]])"
    running = subprocess.Popen(
        [sys.executable, "-S", "-c", root, PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout.readline() == "done\n"
        own, below = seconds_of_tree(running.pid)
    finally:
        running.communicate()
    # The root only waits. Of the two below it, which used 0.3 seconds each, one is alive and one has ended.
    assert own < 0.3
    assert 0.55 <= below < 1.2
    lines = [{"test": f"{name}::x", "own": 1.0, "below": 0.5} for name in ("a.py", "b.py", "a.py")]
    assert sums(lines) == [("a.py", 3.0), ("b.py", 1.5), ("all", 4.5)]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
