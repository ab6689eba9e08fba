"""Seconds until an engine is ready, with and without the canary. Each start has an empty Triton cache.

    python benchmark/kv_canary/bench_startup.py MODEL_DIR [--pairs 2] [--engine '{"max_total_tokens": 200000}'] [--warm]

With --warm all starts share one cache, which two starts fill that are not counted.

Engines log at "error". `--engine '{"log_level": "info"}'` shows what the canary says of its kernels on stderr: which
variants were not predicted, and how long the scheduler process waited for the compile server.

The first start of a machine also reads SGLang and torch from its disk. So one start without the canary comes first and
is not counted. Prints a JSON line per start, and last the mean of the differences. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import bench_switch

OFF = {
    **bench_switch.ENGINE_ARGS,
    "kv_canary": "none",
    "cuda_graph_max_bs": 256,
    "max_running_requests": 256,
    "disable_piecewise_cuda_graph": True,
}
CANARY = {"kv_canary": "log", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 20}


def start_here(model: str, args: dict[str, Any]) -> None:
    """In a process of its own: start, print the seconds, and stop."""
    import sglang

    before = time.perf_counter()
    engine = sglang.Engine(model_path=model, **args)
    print(round(time.perf_counter() - before, 1), flush=True)
    engine.shutdown()


def seconds_of_start(model: str, args: dict[str, Any], filled: str | None = None) -> float:
    """`filled`: folder of Triton's cache; None: an empty one."""
    with tempfile.TemporaryDirectory() as empty:
        cache = filled or empty
        command = [sys.executable, __file__, model, "--start", json.dumps(args)]
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"a start failed with exit status {done.returncode}; its error is above")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--engine", default="{}", help="further Engine arguments, JSON")
    parser.add_argument("--warm", action="store_true", help="all starts share one Triton cache")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        start_here(options.model, json.loads(options.start))
        return
    off = {**OFF, **json.loads(options.engine)}
    on = {**off, **CANARY}
    with tempfile.TemporaryDirectory() as shared:
        cache = shared if options.warm else None
        seconds_of_start(options.model, off, cache)
        if options.warm:
            seconds_of_start(options.model, on, cache)
        more = []
        for _ in range(options.pairs):
            pair = [seconds_of_start(options.model, args, cache) for args in (off, on)]
            print(json.dumps({"off_s": pair[0], "on_s": pair[1]}), flush=True)
            more.append(pair[1] - pair[0])
    print(f"the canary adds {statistics.mean(more):.1f} s")


if __name__ == "__main__":
    main()
