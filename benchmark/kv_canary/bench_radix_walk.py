"""Host time of the sweep's walk over large prefix caches: no call may lengthen a step by more than 1 ms.

    python benchmark/kv_canary/bench_radix_walk.py [--device cuda] [--nodes 100000] [--slots 4000000]

Builds real RadixCache nodes in four shapes, walks each in chunks under a time limit, builds the sweep's plan from each
chunk, and prints per shape the median, 99th percentile and maximum of a call's host time, and the whole pass.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang_kv_canary.sweep.radix_cache_walker import RadixCacheWalker
from sglang_kv_canary.sweep.sweep_plan_builder import (
    build_verify_plan_radix_sweep,
    warm_up_sweep_plan,
)

Parents = Callable[[int, random.Random], int]  # number of a node -> number of its parent, 0 = root

SHAPES: dict[str, Parents] = {
    "flat: all below the root": lambda i, rng: 0,
    "turns: conversations of 50 turns": lambda i, rng: i - 1 if i % 50 else 0,
    "bushy: a random earlier node": lambda i, rng: rng.randrange(i),
    "chain: one path": lambda i, rng: i - 1,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One next_chunk and the plan built from it."""

    wall_us: float
    cpu_us: float  # of this thread: what other processes on the machine cannot lengthen
    slots: int


def build_tree(nodes: int, slots: int, parent_of: Parents, device: str) -> RadixCache:
    """A RadixCache whose nodes are linked directly: inserting 4M tokens one by one would take minutes."""
    cache, rng = RadixCache.create_simulated(), random.Random(0)
    cache.device = torch.device(device)
    values = torch.randperm(slots, device=device).add_(1).split(slots // nodes)
    tree: list[TreeNode] = [cache.root_node]
    for i, value in enumerate(values, start=1):
        node, parent = TreeNode(), tree[parent_of(i, rng)]
        node.parent, node.value = parent, value.clone()
        node.key = RadixKey([i] * value.numel(), extra_key=None)
        parent.children[node.key.child_key(1)] = node
        tree.append(node)
    return cache


def run_pass(
    cache: RadixCache, max_slots: int, max_us: float, lut: torch.Tensor | None
) -> Iterator[Call]:
    walker = RadixCacheWalker(cache, unlocked_only=False, swa_resident_only=False)
    while True:
        wall, cpu = time.perf_counter(), time.thread_time()
        chunk = walker.next_chunk(max_slots, max_us)
        if chunk is None:
            return
        build_verify_plan_radix_sweep(chunk, lut)
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        if walker.device.type == "cuda":
            torch.cuda.synchronize()  # as between steps; not part of the host time
        yield Call(wall * 1e6, cpu * 1e6, chunk.num_slots)


def quantile(values: list[float], q: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, int(q * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--slots", type=int, default=4_000_000)
    parser.add_argument("--max-us", type=float, default=500.0)
    parser.add_argument("--max-slots", type=int, default=65_536)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--swa", action="store_true", help="translate with a full-to-SWA mapping")
    args = parser.parse_args()
    lut = torch.arange(args.slots + 2, device=args.device) if args.swa else None
    print(f"{args.nodes} nodes, {args.slots} slots, {args.max_us:.0f} us, {args.device}")
    print(
        f"{'shape':34} {'calls':>6} {'median':>7} {'p99':>7} {'max us':>7} {'max cpu':>8} {'pass s':>7}"
    )
    for name, parent_of in SHAPES.items():
        cache = build_tree(args.nodes, args.slots, parent_of, args.device)
        gc.collect()
        gc.freeze()  # as SGLang's own freeze_gc: a full collection would look like a slow call
        warm_up_sweep_plan(args.device)  # a server runs such operations all the time
        for _ in range(args.passes):
            calls = list(run_pass(cache, args.max_slots, args.max_us, lut))
            if sum(c.slots for c in calls) != args.slots:
                raise RuntimeError(f"{name}: expected {args.slots} slots, got {calls}")
            wall = sorted(c.wall_us for c in calls)
            print(
                f"{name:34} {len(calls):6} {quantile(wall, 0.5):7.0f} {quantile(wall, 0.99):7.0f} "
                f"{wall[-1]:7.0f} {max(c.cpu_us for c in calls):8.0f} {sum(wall) / 1e6:7.2f}"
            )
        gc.unfreeze()


if __name__ == "__main__":
    main()
