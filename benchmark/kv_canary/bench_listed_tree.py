"""Host time of a sweep over a unified tree of SGLang 0.5.17 and newer.

    python benchmark/kv_canary/bench_listed_tree.py [--core rust|python] [--device cuda] [--slots 500000]
        [--nodes 400 2000 16000] [--part 2048] [--rounds 5] [--at-once]

Real unified trees, filled by inserts below the root. Prints, per number of nodes, the median host time of a list, of
the plans and sums of records that are kept of it, and of one part that is verified, without the launches of the checks.
Nodes are visited, a part of --part slots at a time: then a list is the longest of a pass, nothing is kept, and a part
is the median list with its plan. The core in Rust lists all slots at once on 0.5.21, and with --at-once.
The longest are those of a first round, which loads kernels and fills caches.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.pool_patcher.api import attach_canary_buffers
from sglang_kv_canary.sweep.cached_ends import CachedEnds
from sglang_kv_canary.sweep.staged_list import StagedList
from sglang_kv_canary.sweep.sweep_plan_builder import build_verify_plan_radix_sweep
from sglang_kv_canary.sweep.walkers import walker_of
from sglang_kv_canary.wiring.cached_ends import InsertWatch
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool
from sglang_kv_canary_rigs.radix_fixtures import cache_params


def build_tree(nodes: int, slots: int, device: str) -> tuple[Any, CachedEnds, CanaryBufferGroup]:
    """A unified tree of `nodes` prefixes without a common one, where they end, and the records of its slots."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    pool, allocator = make_mha_pool(size=slots + 1, head_num=1, head_dim=2, layers=1, device=device)
    rows = ReqToTokenPool(4, 64, device, enable_memory_saver=False)
    kinds = (ComponentType.FULL,)
    params = cache_params(allocator, 1, False, req_to_token_pool=rows, tree_components=kinds)
    cache, rng, each = UnifiedRadixCache(params), random.Random(0), slots // nodes
    ends = CachedEnds()
    InsertWatch(ends).attach_radix_cache(cache)
    for node in range(nodes):
        tokens = array("q", [node, *(rng.randrange(1000) for _ in range(each - 1))])
        values = torch.arange(1 + node * each, 1 + (node + 1) * each, device=device)
        cache.insert(InsertParams(key=RadixKey(tokens), value=values))
    return cache, ends, attach_canary_buffers(pool, allocator=allocator, content=False)[0]


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """(us of the host, what `work` returns). The device has nothing else to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    made = work()
    return (time.perf_counter() - began) * 1e6, made


def run_round(
    cache: Any, ends: CachedEnds | None, group: CanaryBufferGroup, part: int, device: str
) -> SimpleNamespace:
    walker = walker_of(cache, ends=ends)
    if not walker.lists_at_once:
        return run_parts(walker, part, device)
    listing, chunk = timed(walker.next_chunk, device)
    keeping, staged = timed(
        lambda: StagedList(((group, build_verify_plan_radix_sweep(chunk)),), chunk.num_slots),
        device,
    )
    parts = [timed(lambda: staged.next(part), device)[0] for _ in range(20)]
    return SimpleNamespace(list=listing, keep=keeping, part=statistics.median(parts))


def run_parts(walker: Any, part: int, device: str) -> SimpleNamespace:
    """All of a pass."""
    lists, plans = [], []
    while True:
        listing, chunk = timed(lambda: walker.next_chunk(max_slots=part), device)
        if chunk is None:
            part_us = statistics.median(lists) + statistics.median(plans)
            return SimpleNamespace(list=max(lists), keep=0.0, part=part_us)
        lists.append(listing)
        plans.append(timed(lambda chunk=chunk: build_verify_plan_radix_sweep(chunk), device)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core", choices=("rust", "python"), default="rust")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", type=int, default=500_000)
    parser.add_argument("--nodes", type=int, nargs="*", default=[400, 2_000, 16_000])
    parser.add_argument("--part", type=int, default=2_048, help="slots")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", action="store_true", help="as if no insert were followed")
    options = parser.parse_args()
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = options.core
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=1))
    print(f"{options.slots} slots, {options.core} core, {options.device}; us: median; longest")
    for nodes in options.nodes:
        cache, ends, group = build_tree(nodes, options.slots, options.device)
        known = None if options.at_once else ends
        rounds = [
            run_round(cache, known, group, options.part, options.device)
            for _ in range(options.rounds)
        ]
        figures = {name: [getattr(r, name) for r in rounds] for name in ("list", "keep", "part")}
        text = ", ".join(
            f"{name} {statistics.median(of):.0f}; {max(of):.0f}" for name, of in figures.items()
        )
        print(f"{nodes:6} nodes: {text}", flush=True)


if __name__ == "__main__":
    main()
