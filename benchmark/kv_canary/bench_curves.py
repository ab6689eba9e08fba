"""How the cost of a decode step grows with batch, prefix and pool size; figures and a plot.

    PYTHONPATH=python python benchmark/kv_canary/bench_curves.py [--svg docs/cost_curves.svg] [--out curves.json]

Needs a GPU, torch, triton and matplotlib, not SGLang. "In line" is what a decode graph runs before and behind the
model's layers (HEAD, TAIL's writes), "beside" what it runs on a branch of its own (TAIL's checks).
Times are of CUDA graph replays with the L2 cache flushed before each launch, default budgets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from bench_kernels import (
    CONTENT_SLOTS,
    DEFAULT_VERIFY_BUDGET,
    DEVICE,
    UNLIMITED,
    Batch,
    cold_time,
    graph_time,
    make_group,
    make_state,
    run_content,
    run_forward,
)

from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.endpoint import Part
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.plan.plan_input import SweepVerifyPlan
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import PREV_ANCHOR

BATCHES = [1, 4, 16, 64, 256, 1024, 4096]
PREFIX = 512  # of the batches
PREFIXES = [1, 128, 1024, 8192, 32768, 131072]
REQUESTS = 8  # with each prefix
POOLS = [1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22]
# Of a slot: HEAD and TAIL of K and V, and the list's entry; K and V, and the index.
LIST_BYTES, VERIFY_BYTES = 4 * 32 + 24, 2 * 32 + 4
SPARE = 1024

Curve = list[tuple[int, float]]


def step_times(size: int, prefix: int) -> dict[str, float]:
    """Microseconds of one decode step of `size` requests with `prefix` tokens each."""
    slots = size * (prefix + 1) + SPARE
    group, batch = make_group(slots), Batch(size, prefix, slots)
    state = make_state(DEFAULT_VERIFY_BUDGET)
    run_forward(batch.prefill(), group, state)
    plan = batch.decode()

    def launch(side: Side, part: Part) -> Callable[[], None]:
        return lambda: triton_backend.check_and_write(plan, group, side, state, part)

    inline = [launch(Side.HEAD, Part.ALL), launch(Side.TAIL, ~Part.VERIFY)]
    times = {"in line": cold_time(inline), "beside": cold_time([launch(Side.TAIL, Part.VERIFY)])}
    if int(state.violations.total):
        raise RuntimeError(f"{int(state.violations.total)} violations in a clean batch")
    return times


def content_times(size: int, prefix: int) -> dict[str, float]:
    """The same of the content launches, mode `all`."""
    group, batch = make_group(CONTENT_SLOTS, with_content=True), Batch(size, prefix, CONTENT_SLOTS)
    state = make_state(DEFAULT_VERIFY_BUDGET)
    run_forward(batch.prefill(), group, state, ContentMode.ALL)
    plan = batch.decode()
    run_forward(plan, group, state, ContentMode.ALL)
    launch = [lambda: run_content(plan, group, state, ContentMode.ALL)]
    return {"content": cold_time(launch)}


def pool_times(slots: int) -> dict[str, float]:
    """Microseconds in which all slots of a pool are checked: by a sweep's list, by one decode step without budget."""
    rows = max(1, slots >> 17)
    prefix = slots // rows - 1
    group, batch = make_group(slots + SPARE), Batch(rows, prefix, slots + SPARE)
    state = make_state(UNLIMITED)
    run_forward(batch.prefill(), group, state)
    flat = batch.req_to_token[1:, :prefix].long()
    prev = torch.cat([torch.full_like(flat[:, :1], PREV_ANCHOR), flat[:, :-1]], 1).flatten()
    positions = torch.arange(prefix, device=DEVICE).repeat(rows)
    listed = SweepVerifyPlan(flat.flatten(), positions, prev)
    plan = batch.decode()
    return {
        "sweep": graph_time(lambda: triton_backend.check_list(listed, group, state), 5),
        "decode step": graph_time(
            lambda: triton_backend.check_and_write(plan, group, Side.TAIL, state), 5
        ),
    }


def curves(sizes: list[int], measure: Callable[[int], dict[str, float]]) -> dict[str, Curve]:
    result: dict[str, Curve] = {}
    for size in sizes:
        for name, micros in measure(size).items():
            result.setdefault(name, []).append((size, round(micros, 2)))
        torch.cuda.empty_cache()
        print(json.dumps({"size": size, **{n: c[-1][1] for n, c in result.items()}}), flush=True)
    return result


def plot(panels: dict[str, dict[str, Curve]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(panels) // 2)  # two panels beside each other can be read on a page
    figure, axes = pyplot.subplots(rows, 2, figsize=(10, 4 * rows), squeeze=False)
    for axis, (title, named) in zip(axes.flat, panels.items(), strict=False):
        for name, curve in named.items():
            axis.plot(*zip(*curve, strict=True), marker="o", label=name)
        axis.set(xscale="log", xlabel=title, ylabel="microseconds", ylim=(0, None))
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--svg", help="file for the plot")
    parser.add_argument("--out", help="file for the figures, JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    panels = {
        f"requests, prefix {PREFIX}": curves(BATCHES, lambda n: step_times(n, PREFIX)),
        f"prefix, {REQUESTS} requests": curves(PREFIXES, lambda n: step_times(REQUESTS, n)),
        "requests, prefix 512, content all": curves(
            [1, 4, 16, 64, 128], lambda n: content_times(n, PREFIX)
        ),
        "slots checked at once": curves(POOLS, pool_times),
    }
    rates = panels["slots checked at once"]
    for name, size in (("sweep", LIST_BYTES), ("decode step", VERIFY_BYTES)):
        print(
            name,
            [f"{slots}: {slots * size / micros / 1e6:.2f} TB/s" for slots, micros in rates[name]],
        )
    if options.svg:
        plot(panels, options.svg)
    if options.out:
        Path(options.out).write_text(json.dumps(panels, indent=1))


if __name__ == "__main__":
    main()
