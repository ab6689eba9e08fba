"""Whole-server cost of the canary: the same engine off and on, back to back, case by case.

    python benchmark/kv_canary/bench_server.py MODEL_DIR [--variants off,log,partial,all] [--cases 1x512x512 ...]
        [--engine '{"attention_backend": "triton"}'] [--reps 3] [--out results.jsonl]

Every variant is an engine in a process of its own, all on one GPU; they start together and then take turns:
for each case and repetition every variant runs once, so that drift of the machine hits all alike. Idle engines
put nothing on the GPU. A case is BATCHxINPUTxOUTPUT tokens. Prints one JSON line per case and variant and, last,
a table of medians with the cost against `off` in per cent and in microseconds a step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import statistics
import time
from typing import Any

from sglang_kv_canary.seam_guard import BUILTIN_ENV
from sglang_kv_canary.wiring.releases import release

VARIANTS: dict[str, dict[str, Any]] = {
    "off": {},
    "off2": {},  # a second engine without the canary: what differs between equals is noise
    "log": {"kv_canary": "log"},
    "partial": {"kv_canary": "log", "kv_canary_real_data": "partial"},
    "all": {"kv_canary": "log", "kv_canary_real_data": "all"},
    # SGLang's own canary, from 0.5.13 on: the K half, and the bytes of one layer
    "builtin": {"kv_canary": "log"},
    "builtin_all": {"kv_canary": "log", "kv_canary_real_data": "all"},
}
# The flag for the largest decode graph, before 0.5.13 and from then on
_MAX_GRAPH = ("cuda_graph_max_bs", "cuda_graph_max_bs_decode")
DEFAULT_CASES = ("1x512x512", "64x256x512", "128x512x512", "16x16384x1")


def _serve(pipe: Any, name: str, model: str, args: dict[str, Any]) -> None:
    """Engine process: answers (input ids, output length) with seconds."""
    if name.startswith("builtin"):
        os.environ[BUILTIN_ENV] = "1"
    import sglang

    start = time.perf_counter()
    engine = sglang.Engine(model_path=model, **args)
    pipe.send(time.perf_counter() - start)
    while (job := pipe.recv()) is not None:
        ids, output_len = job
        engine.flush_cache()
        params = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}
        start = time.perf_counter()
        results = engine.generate(input_ids=ids, sampling_params=params)
        seconds = time.perf_counter() - start
        lengths = {len(r["output_ids"]) for r in results}
        if lengths != {output_len}:
            raise RuntimeError(f"expected {output_len} tokens from every request, got {lengths}")
        time.sleep(0.1)  # let the canary hand over its last step before another engine runs
        pipe.send(seconds)
    engine.shutdown()


def _start(names: list[str], model: str, engine: dict[str, Any]) -> dict[str, Any]:
    context = mp.get_context("spawn")
    pipes = {}
    for i, name in enumerate(names):
        pipe, child = context.Pipe()
        args = {"port": 30000 + 100 * i, **engine, **VARIANTS[name]}
        context.Process(target=_serve, args=(child, name, model, args)).start()
        pipes[name] = pipe
    for name, pipe in pipes.items():
        print(json.dumps({"variant": name, "startup_s": round(pipe.recv(), 1)}), flush=True)
    return pipes


def _run_case(
    pipes: dict[str, Any], case: str, reps: int, rng: random.Random
) -> dict[str, list[float]]:
    batch, input_len, output_len = map(int, case.split("x"))
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for rep in range(reps + 1):
        ids = [[rng.randrange(10, 1000) for _ in range(input_len)] for _ in range(batch)]
        for name, pipe in pipes.items():
            pipe.send((ids, output_len))
            took = pipe.recv()
            if rep:  # the first run compiles and warms up
                seconds[name].append(took)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--variants", default="off,log,partial,all")
    parser.add_argument("--cases", nargs="*", default=list(DEFAULT_CASES))
    parser.add_argument("--engine", default="{}", help="further Engine arguments, JSON")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--max-total-tokens", type=int, default=140_000, help="KV slots per engine")
    parser.add_argument("--out")
    options = parser.parse_args()
    names = options.variants.split(",")
    engine = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        # The engines measure free memory while the others start, so the pool size is given, not profiled.
        "mem_fraction_static": 0.9,
        "max_total_tokens": options.max_total_tokens,
        _MAX_GRAPH[release().has_own_canary]: 128,
        "log_level": "error",
        "random_seed": 1,
        **json.loads(options.engine),
    }
    pipes = _start(names, options.model, engine)
    rng, lines = random.Random(0), []
    for case in options.cases:
        seconds = _run_case(pipes, case, options.reps, rng)
        for name in names:
            line = {"case": case, "variant": name, "seconds": [round(s, 5) for s in seconds[name]]}
            line["median"] = round(statistics.median(seconds[name]), 5)
            lines.append(line)
            print(json.dumps(line), flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    _table(lines, names)
    if options.out:
        with open(options.out, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def _table(lines: list[dict[str, Any]], names: list[str]) -> None:
    base = names[0]
    print(f"{'case':<16}{base + ' s':>10}" + "".join(f"{n:>22}" for n in names[1:]))
    for case in dict.fromkeys(line["case"] for line in lines):
        runs = {line["variant"]: line["seconds"] for line in lines if line["case"] == case}
        off, steps = statistics.median(runs[base]), int(case.split("x")[2])
        cells = []
        for name in names[1:]:
            # pairwise: each repetition against its neighbour in time
            ratio = statistics.median(b / a for a, b in zip(runs[base], runs[name], strict=True))
            cells.append(f"{100 * (ratio - 1):+.2f} % ({off * (ratio - 1) / steps * 1e6:+.1f} us)")
        print(f"{case:<16}{off:>10.4f}" + "".join(f"{c:>22}" for c in cells), flush=True)


if __name__ == "__main__":
    main()
