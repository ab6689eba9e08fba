"""CPU time of a decode step's checks with the reference kernels, which check on machines without a GPU.

    python benchmark/kv_canary/bench_reference.py [--requests 3] [--prefix 40] [--steps 160]

An MHA pool of two layers, content `all`, all launches of HEAD and TAIL. Prints the minimum and the median of the
scheduler thread's CPU time. That of a server's small batches is mostly the number of NumPy calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from sglang_kv_canary.launch.launcher import Launcher
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool

MOST_TOKENS = 256  # of a row of the rig


class Stopwatch:
    """Sums up the CPU time of the launches."""

    def __init__(self) -> None:
        self.spent = 0.0

    def install(self) -> None:
        launch = Launcher.launch

        def timed(launcher: Launcher, *args: Any, **kwargs: Any) -> None:
            start = time.thread_time()
            launch(launcher, *args, **kwargs)
            self.spent += time.thread_time() - start

        Launcher.launch = timed


def _seconds(requests: int, prefix: int, steps: int) -> list[float]:
    """Of each step."""
    rig, watch = ManagerRig(real=make_mha_pool(size=4096, head_num=2, head_dim=16)), Stopwatch()
    rows = list(range(1, requests + 1))
    for row in rows:
        rig.extend(row, range(100 * row, 100 * row + prefix))
    watch.install()
    seconds = []
    for _ in range(steps):
        before = watch.spent
        rig.decode(rows)
        seconds.append(watch.spent - before)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a decode step's checks on a CPU.")
    parser.add_argument("--requests", type=int, default=3, help="running (default %(default)s)")
    parser.add_argument("--prefix", type=int, default=40, help="tokens each (default %(default)s)")
    parser.add_argument("--steps", type=int, default=160, help="decodes (default %(default)s)")
    options = parser.parse_args()
    if options.prefix + options.steps > MOST_TOKENS:
        parser.error(
            f"expected --prefix and --steps of at most {MOST_TOKENS} together, got "
            f"{options.prefix + options.steps}"
        )
    seconds = _seconds(options.requests, options.prefix, options.steps)
    least, median = (1e3 * value for value in (min(seconds), statistics.median(seconds)))
    print(
        f"decode {options.requests} x {options.prefix}: {least:.2f} ms, median {median:.2f} ms of CPU time"
    )


if __name__ == "__main__":
    main()
