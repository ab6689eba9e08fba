"""Probability and latency of detection for random damage: one flipped bit of K or V, theory beside measurement, on CPU.

    python benchmark/kv_canary/bench_detection.py [--trials 300]

A real manager and pool, driven forward by forward. Each trial flips one random bit of the K and V that are watched,
counts the forwards until it is reported, and flips the bit back. docs/reliability.md derives the formulas.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary_rigs import tree_rig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool
from sglang_kv_canary_rigs.tree_rig import TreeRig

HEADS, HEAD_DIM, LAYERS = 4, 16, 2
ROW_BYTES = HEADS * HEAD_DIM * 4  # of one slot, layer and half
SLOT_BYTES = 2 * LAYERS * ROW_BYTES
SECTOR = 32  # bytes that `partial` reads of each layer and half
PREFIX = 512  # slots that are watched
# Interval, budget in slots, steps between two parts
SWEEPS = (
    (1, 4096, 1),
    (50, 4096, 1),
    (1, 128, 1),
    (1, 128, 4),
    (50, 128, 16),
)
GOLDEN = (math.sqrt(5) - 1) / 2


class Scene:
    """One prefix of PREFIX slots, which `reads` says whether a request reads in each forward."""

    def __init__(self, content: ContentMode, reads: bool, **settings: Any) -> None:
        tree_rig.POOLS["bench"] = lambda size: make_mha_pool(
            size=size, layers=LAYERS, head_num=HEADS, head_dim=HEAD_DIM
        )
        self.rig = TreeRig(
            "bench", size=4096, content=content, context_len=4096, history_slots=0, **settings
        )
        manager = self.rig.manager
        if manager.config.sweep_interval:
            sweep = SweepOrchestrator(manager.config, manager.groups, manager.sink)
            manager.observers.append(sweep)
            manager.attach_radix_cache(self.rig.tree)
        prompt = list(range(5, 5 + PREFIX))
        if reads:
            self.request = self.rig.admit(prompt)
            self.slots = self.rig.rows.req_to_token[self.request.req_pool_idx, :PREFIX].tolist()
        else:
            self.rig.serve(prompt)
            self.slots = self.rig.cached_slots(prompt)
            self.request = self.rig.admit([900, 901, 902])

    @property
    def length(self) -> int:
        """Tokens of the request."""
        return self.rig.lengths[self.request.req_pool_idx]

    def forward(self) -> None:
        """One decode. Its findings are in when it returns."""
        self.rig.decode_request(self.request, 7)
        self.rig.manager.drain(wait=True)

    @contextmanager
    def flipped(self, rng: random.Random) -> Iterator[None]:
        """One bit of the watched K and V."""
        pool = self.rig.pool
        buffer = rng.choice([*pool.k_buffer, *pool.v_buffer])
        row = buffer[rng.choice(self.slots)].view(torch.uint8).flatten()
        byte, bit = rng.randrange(row.numel()), 1 << rng.randrange(8)
        row[byte] ^= bit
        try:
            yield
        finally:
            row[byte] ^= bit

    def forwards_until_seen(self, rng: random.Random, limit: int) -> int | None:
        """None: not within `limit` forwards."""
        for _ in range(rng.randrange(limit)):  # any phase
            self.forward()
        before = len(self.rig.reported)
        with self.flipped(rng):
            seen = next((n for n in range(1, limit + 1) if self._reports(before)), None)
        for _ in range(2):  # what was found with the bit flipped is reported by then
            self.forward()
        return seen

    def _reports(self, before: int) -> bool:
        """Whether there are more than `before` findings after one more forward."""
        self.forward()
        return len(self.rig.reported) > before


def trials(make: Callable[[], Scene], count: int, limit: int, room: int = 1000) -> list[int | None]:
    """A fresh scene before the request is `room` tokens longer."""
    rng, scene, found = random.Random(1), make(), []
    begun = scene.length
    for _ in range(count):
        if scene.length - begun > room - 4 * limit:
            scene = make()
        found.append(scene.forwards_until_seen(rng, limit))
    return found


def shown(name: str, theory: str, found: Sequence[int | None]) -> None:
    seen = [n for n in found if n is not None]
    share = f"{len(seen) / len(found):7.3f}"
    mean, most = (f"{statistics.mean(seen):6.2f}", f"{max(seen):4}") if seen else ("     -", "   -")
    print(f"{name:44} {theory:30} {share} {mean} {most} {len(found):6}", flush=True)


def waits(k: int, forwards: int = 20_000) -> tuple[float, int]:
    """Mean and maximum wait for one of `k` turns, if forward n has the turn floor(k frac(n / golden ratio))."""
    turns = [int(k * math.modf(n * GOLDEN)[0]) for n in range(forwards)]
    last, every = {}, []
    for n in reversed(range(forwards)):
        last[turns[n]] = n
        if len(last) == k:
            every += [last[turn] - n + 1 for turn in range(k)]
    return statistics.mean(every), max(every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=300)
    count = parser.parse_args().trials
    if count < 1:
        parser.error(f"--trials {count}: expected a number >= 1")
    print(f"{ROW_BYTES} bytes a slot, layer and half; {LAYERS} layers; {PREFIX} slots watched")
    print(f"{'case':44} {'theory':30} {'share':>7} {'mean':>6} {'most':>4} {'trials':>6}")
    logging.disable()  # each finding would be logged
    for mode, share in (
        (ContentMode.NONE, 0.0),
        (ContentMode.PARTIAL, SECTOR / ROW_BYTES),
        (ContentMode.ALL, 1.0),
    ):
        found = trials(lambda m=mode: Scene(m, reads=True), count, 1)
        shown(f"read by a request, {mode.value}", f"share {share:.3f}, at once", found)
    for k in (2, 4, 8):
        room = PREFIX // k  # a longer request would have another k
        budget = -(-(PREFIX + room) // k) * SLOT_BYTES

        def scene(budget: int = budget) -> Scene:
            return Scene(ContentMode.ALL, reads=True, content_budget_bytes=budget)

        mean, most = waits(k)
        found = trials(scene, count // 2, 2 * k, room)
        shown(f"read, all, budget for 1 slot in {k}", f"mean {mean:.2f}, at most {most}", found)
    for interval, slots, every in SWEEPS:
        chunks = -(-PREFIX // slots)
        period = max(interval, chunks * every + 1)
        case = f"idle, sweep interval {interval}, {slots} slots every {every} steps"

        def scene(i: int = interval, s: int = slots, e: int = every) -> Scene:
            return Scene(
                ContentMode.ALL,
                reads=False,
                sweep_interval=i,
                sweep_budget_slots=s,
                sweep_every_n_steps=e,
            )

        found = trials(scene, count // 4, 2 * period + 12)
        shown(case, f"mean {(period + 1) / 2:.1f}, at most {period}", found)


if __name__ == "__main__":
    main()
