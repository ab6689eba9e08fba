"""Host time that the sweep adds to a step: walk, plan, launches and bookkeeping, over large prefix caches.

    python benchmark/kv_canary/bench_sweep.py [--device cuda] [--nodes 100000] [--slots 4000000] [--svg FILE]

A real manager over a real MHA pool sweeps a real RadixCache, step by step. The device's armed flag is off, so the
kernels are launched and return at once: what they take is device time, which bench_kernels measures. Prints per
tree shape the median, 99th percentile and maximum of a step's host time; no step may exceed 1 ms. `--svg` plots the
share of steps below each time.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import torch
from bench_radix_walk import SHAPES, build_tree, quantile

from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool

LIMIT_US = 1000.0
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")


def make_rig(args: argparse.Namespace) -> ManagerRig:
    """A manager whose pool has the tree's slots and little else."""
    real = make_mha_pool(
        size=args.slots, layers=1, head_num=1, head_dim=4, dtype=torch.float16, device=args.device
    )
    rig = ManagerRig(
        content=ContentMode.NONE,
        real=real,
        device=args.device,
        sweep_interval=1,
        sweep_budget_slots=args.max_slots,
        sweep_budget_us=args.max_us,
    )
    rig.manager.state.set_armed(False)
    return rig


def step_times(rig: ManagerRig, cache: RadixCache, passes: int) -> list[tuple[float, float]]:
    """(wall, cpu) microseconds of each step of `passes` passes."""
    manager = rig.manager
    sweep = SweepOrchestrator(manager.config, manager.groups, manager.sink)
    sweep.attach_radix_cache(cache)
    times, ended = [], 0
    while ended < passes:
        wall, cpu = time.perf_counter(), time.thread_time()
        sweep.maybe_run_sweep(manager)
        times.append(((time.perf_counter() - wall) * 1e6, (time.thread_time() - cpu) * 1e6))
        ended += sweep.is_between_passes
        if manager.identity.device != "cpu":
            torch.cuda.synchronize()  # as between steps; not part of the host time
    return times


def svg(curves: dict[str, list[float]]) -> str:
    """Share of steps (y, 0 to 1) below a host time (x, 0 to LIMIT_US), one line per tree shape."""
    width, height, left, top = 640, 320, 50, 20
    parts = [
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#888"/>'
    ]
    for us in range(0, int(LIMIT_US) + 1, 250):
        x = left + width * us / LIMIT_US
        parts.append(
            f'<text x="{x:.0f}" y="{top + height + 16}" text-anchor="middle">{us} us</text>'
        )
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{share:.0%}</text>')
    for i, (name, wall) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = []
        for q in range(201):
            x = left + width * min(quantile(wall, q / 200), LIMIT_US) / LIMIT_US
            points.append(f"{x:.1f},{top + height * (1 - q / 200):.1f}")
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{left + 10}" y="{top + 20 + 16 * i}" fill="{colour}">{name}</text>')
    size = f'width="{left + width + 20}" height="{top + height + 30}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--slots", type=int, default=4_000_000)
    parser.add_argument("--max-us", type=int, default=500)
    parser.add_argument("--max-slots", type=int, default=65_536)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--svg", help="file for the plot")
    args = parser.parse_args()
    rig, curves = make_rig(args), {}
    print(f"{args.nodes} nodes, {args.slots} slots, budget {args.max_us} us, {args.device}")
    print(
        f"{'shape':34} {'steps':>6} {'median':>7} {'p99':>7} {'max us':>7} {'max cpu':>8} {'over':>5}"
    )
    for name, parent_of in SHAPES.items():
        cache = build_tree(args.nodes, args.slots, parent_of, args.device)
        gc.collect()
        gc.freeze()  # as SGLang's own freeze_gc: a full collection would look like a slow step
        times = step_times(rig, cache, args.passes)
        gc.unfreeze()
        wall = curves[name] = sorted(t[0] for t in times)
        over = sum(t > LIMIT_US for t in wall)
        print(
            f"{name:34} {len(wall):6} {quantile(wall, 0.5):7.0f} {quantile(wall, 0.99):7.0f} "
            f"{wall[-1]:7.0f} {max(t[1] for t in times):8.0f} {over:5}",
            flush=True,
        )
    if args.svg:
        Path(args.svg).write_text(svg(curves))


if __name__ == "__main__":
    main()
