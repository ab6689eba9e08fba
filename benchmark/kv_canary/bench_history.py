"""Cost and bounds of the slot history: allocator events through the hooks, under overlap, on CPU.

    python benchmark/kv_canary/bench_history.py [--events 1000000] [--every 200]

A real manager and a real allocator in mode `raise`. Between two forwards, requests end, are evicted and retracted, and
new ones take their slots; results arrive one step late. Prints, with and without the history, the time of an
allocation or free with its hook, the time of the history's copies per step, and how much memory was added. A false
alarm ends the run.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins import load_plugins
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.manager_rig import MAX_REQUESTS, ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool


@dataclass
class Req:
    """As SGLang's functions have it under this name."""

    rid: str


def evict(allocator: Any, slots: Any) -> None:
    allocator.free(slots)


def cache_finished_req(req: Req, allocator: Any, slots: Any) -> None:
    allocator.free(slots)


def release_kv_cache(req: Req, allocator: Any, slots: Any) -> None:
    cache_finished_req(req, allocator, slots)


def retract_decode(req: Req, allocator: Any, slots: Any) -> None:
    release_kv_cache(req, allocator, slots)


def max_rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclass
class _Clock:
    spent_ns: int = 0

    def around(self, function: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start = time.thread_time_ns()
            function(*args)
            self.spent_ns += time.thread_time_ns() - start

        return timed


def run(events: int, every: int, capacity: int) -> dict[str, float]:
    """Time in the hooks and in the history's copies, of `events` allocations and frees."""
    context.reset()
    rig = ManagerRig(
        CanaryMode.RAISE, real=make_mha_pool(size=4096), history_slots=capacity, context_len=64
    )
    watch_allocator(rig.allocator)
    context.add(rig.manager, rig)
    context.recorder, context.history = rig.recorder, rig.history
    rng, late, hooks, steps, done = random.Random(1), [], 0, 0, 0
    kept = _Clock()
    if history := context.history:
        history.keep = kept.around(history.keep)
    began = max_rss_mib()
    while done < events:
        counts = [rng.randrange(1, 40) for _ in range(every // 2)]
        ends = [rng.choice((release_kv_cache, retract_decode)) for _ in counts]
        start = time.thread_time_ns()
        slots = [rig.allocator.alloc(count) for count in counts]
        evict(rig.allocator, slots.pop())
        for end, each in zip(ends, slots, strict=False):
            end(Req("ada"), rig.allocator, each)
        hooks += time.thread_time_ns() - start
        done += every
        steps += 1
        row = rng.randrange(1, MAX_REQUESTS)
        if rig.lengths[row] > 40:
            rig.recorder.row_released(row)
            release_kv_cache(
                Req(f"req-{row}"), rig.allocator, rig.rows.req_to_token[row, : rig.lengths[row]]
            )
            rig.lengths[row] = 0
        late.append(rig.decode([row]) if rig.lengths[row] else rig.extend(row, range(10)))
        if len(late) > 1:
            rig.recorder.result_arrived(late.pop(0))
            rig.manager.drain()
    assert rig.settle() == []
    return {
        "us_an_event_in_hooks": hooks / 1000 / done,
        "us_a_step_in_copies": kept.spent_ns / 1000 / steps,
        "grown_mib": max_rss_mib() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=200, help="events between two forwards")
    parser.add_argument("--capacity", type=int, default=1 << 20, help="slots")
    options = parser.parse_args()
    load_plugins()
    run(options.every * 50, options.every, 0)  # warm up
    for name, capacity in (("without", 0), ("with", options.capacity)):
        figures = run(options.events, options.every, capacity)
        text = ", ".join(f"{key} {value:.2f}" for key, value in figures.items())
        print(f"{name:<8}{options.events} events, {text}", flush=True)


if __name__ == "__main__":
    main()
