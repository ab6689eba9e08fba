"""GPU time of the canary's own kernels inside a real server: what each decode step and prefill forward pays.

    python benchmark/kv_canary/profile_server.py MODEL_DIR [--cases 1x512x64 ...] [--content none|partial|all]

Two servers' run times differ by up to 1 % with nothing changed (memory placement), which is more than the canary
costs. The profiler sees the kernels themselves, with the caches as the model's layers leave them. Per case it prints
microseconds a forward (a step, if speculative) for each canary kernel, the forward's GPU time, the share, and the time
from one forward to the next. Kernels on a stream of their own run beside the layers. A case is BATCHxINPUTxOUTPUT.
"""

from __future__ import annotations

import argparse
import collections
import glob
import gzip
import json
import os
import random
import statistics
import tempfile
import time
from typing import Any

CANARY_KERNELS = (
    "forward_kernel",
    "content_kernel",
    "slot_event_kernel",
    "slot_runs_kernel",
    "content_list",
    "sweep_kernel",
)


def _kernels(folder: str) -> list[dict[str, Any]]:
    """GPU kernels and copies of the newest trace in `folder`, in order of start."""
    deadline = time.monotonic() + 120
    while not (paths := glob.glob(f"{folder}/*.trace.json.gz")) and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(2)  # the trace is written in the background
    with gzip.open(max(paths, key=os.path.getmtime), "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(kernels, key=lambda e: e["ts"])


def _report(case: str, kernels: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    ours: dict[str, list[float]] = collections.defaultdict(list)
    most = collections.Counter(event["args"].get("stream") for event in kernels).most_common(1)
    for event in kernels:
        for name in CANARY_KERNELS:
            if event["name"].startswith(name):
                beside = event["args"].get("stream") != most[0][0]
                ours[f"{name} beside" if beside else name].append(event["dur"])
    busy = sum(event["dur"] for event in kernels)
    canary = sum(sum(durations) for durations in ours.values())
    span = max(event["ts"] + event["dur"] for event in kernels) - kernels[0]["ts"]
    return {
        "case": case,
        "forwards": steps,
        "span_us_a_forward": round(span / steps, 2),
        "gpu_us_a_forward": round(busy / steps, 2),
        "canary_us_a_forward": round(canary / steps, 2),
        "share_percent": round(100 * canary / max(busy - canary, 1e-9), 3),
        "kernels": {
            name: {
                "launches_a_forward": round(len(durations) / steps, 2),
                "median_us": round(statistics.median(durations), 2),
                "us_a_forward": round(sum(durations) / steps, 2),
            }
            for name, durations in sorted(ours.items())
        },
    }


def _profile(engine: Any, case: str, rng: random.Random) -> dict[str, Any]:
    batch, input_len, output_len = map(int, case.split("x"))
    params = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}

    def run() -> int:
        """Decode steps."""
        ids = [[rng.randrange(10, 1000) for _ in range(input_len)] for _ in range(batch)]
        engine.flush_cache()
        results = engine.generate(input_ids=ids, sampling_params=params)
        return max(r["meta_info"].get("spec_verify_ct", output_len - 1) for r in results)

    run()
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["GPU"])
        decodes = run()
        engine.stop_profile()
        kernels = _kernels(folder)
    prefills = -(-batch * input_len // engine.server_args.chunked_prefill_size)
    return _report(case, kernels, decodes + prefills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument(
        "--cases", nargs="*", default=["1x512x64", "64x256x64", "128x512x64", "4x16384x1"]
    )
    parser.add_argument("--content", default="all", choices=["none", "partial", "all"])
    parser.add_argument("--engine", default="{}", help="further Engine arguments, JSON")
    parser.add_argument("--out")
    options = parser.parse_args()
    import sglang

    args = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "max_total_tokens": 140_000,
        "cuda_graph_max_bs": 128,
        "log_level": "error",
        "kv_canary": "log",
        "kv_canary_real_data": options.content,
        **json.loads(options.engine),
    }
    engine = sglang.Engine(model_path=options.model, **args)
    rng = random.Random(0)
    for case in options.cases:
        line = json.dumps({"content": options.content, **_profile(engine, case, rng)})
        print(line, flush=True)
        if options.out:
            with open(options.out, "a") as file:
                file.write(line + "\n")
    engine.shutdown()


if __name__ == "__main__":
    main()
