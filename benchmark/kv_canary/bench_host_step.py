"""Host time of all of the canary's hooks in a decode step under churn, with cold caches, by entry.

    python benchmark/kv_canary/bench_host_step.py [--device cuda] [--modes raise,log] [--requests 200] [--steps 200]
        [--python] [--out results.jsonl]

A real manager, pool, allocator and prefix cache, without an engine. The hooks are those of the installed release, in
SGLang's own wrappers, around functions that do what SGLang's do outside of the timed parts. In `--replaced` of the
steps a request ends and a new one is prefilled, in `--evicts` of them the prefix cache evicts. A pass of the sweep is
due every `--sweep` steps. Before each entry, `--cold-mib` of memory are written, as a model's forward evicts the
caches. Prefills run between the steps and are not timed.

Prints, per mode, CPU time of the thread and wall time of a step and of each entry, in us: median and lowest tenth of
all steps. On a CPU, launches are prepared and not run (`without_kernels.py`). With `--device cuda` they are real, the
decode is a graph, and what the kernels check must be in order. The host waits for the device between steps only.
It runs on SGLang 0.5.12.post1.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import without_kernels
from hooked_functions import Clock, Hooked, HookedAllocator, HookedRows, TimedAllocator, hook_in

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.environ import default_of
from sglang_kv_canary.host_code import HOST, begin_to_compile
from sglang_kv_canary.launch.warm_up import (
    warm_up_joins,
    warm_up_next_tokens,
    warm_up_slot_events,
    warm_up_sweep,
)
from sglang_kv_canary.observers import build_observers
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.farewell import Farewell
from sglang_kv_canary_rigs.tree_rig import TreeRig

SPARE_STEPS = 60  # before those that are timed: kernels are compiled, a pass of the sweep ends
PROMPT = (32, 256)
VOCABULARY = 1000
# A cold step takes so many times as long as one of a server. What is done by time is done as seldom, per step.
SLOWER_WHEN_COLD = 12
SHARE_CACHED = 0.5  # slots for the prefix cache, as a share of those of running requests


# What runs decodes


class WithoutKernels:
    """A replay that only counts."""

    replays = True

    def __init__(self, rig: TreeRig, batch: ForwardBatch) -> None:
        self._state = rig.manager.state

    def run(self, batch: ForwardBatch) -> None:
        without_kernels.count_as_on_a_gpu(self._state)


class Graph:
    """A CUDA graph of the checks and of a model that only writes K and V."""

    replays = True

    def __init__(self, rig: TreeRig, batch: ForwardBatch) -> None:
        self._graph, self._batch = torch.cuda.CUDAGraph(), batch
        manager = rig.manager
        with manager.disarmed():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._forward(rig, batch)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self._graph):
                self._forward(rig, batch)

    @staticmethod
    def _forward(rig: TreeRig, batch: ForwardBatch) -> None:
        with rig.manager.bracket_model_forward(batch):
            rig._model(batch.out_cache_loc)

    def run(self, batch: ForwardBatch) -> None:
        for name in ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "positions"):
            getattr(self._batch, name).copy_(getattr(batch, name))
        self._graph.replay()


class Eager:
    """For the test of this benchmark: the forward itself, on any backend."""

    replays = False

    def __init__(self, rig: TreeRig, batch: ForwardBatch) -> None:
        self._rig = rig

    def run(self, batch: ForwardBatch) -> None:
        with self._rig.manager.bracket_model_forward(batch):
            self._rig._model(batch.out_cache_loc)


# Traffic


class HookedRig(TreeRig):
    def _watch_allocators(self) -> None:
        """Hooks do it."""


class Server:
    """Decode steps of running requests, of which one ends now and then. `step` times one."""

    prompt = PROMPT
    times_prefills = False

    def __init__(self, options: argparse.Namespace, mode: CanaryMode, decoder: Any) -> None:
        context.reset()
        self._options, self._rng = options, random.Random(options.seed)
        self._device = options.device
        self.clock = Clock(options.cold_mib)
        life = int(options.requests / options.replaced) + 1  # steps of a request
        longest = self.prompt[1] + life + SPARE_STEPS
        self._least = 2 * options.requests + longest  # slots that a step must find free
        running = options.requests * (sum(self.prompt) // 2 + life // 2)
        self._spare = 2 * self._least  # slots that are free after an eviction
        self.rig = HookedRig(
            size=int(running * (1 + SHARE_CACHED)) + 2 * self._spare,
            device=options.device,
            mode=mode,
            max_requests=options.requests + 1,
            context_len=longest,
            sweep_interval=options.sweep,
            sweep_every_n_steps=default_of("SWEEP_EVERY_N_STEPS"),
            sweep_budget_us=default_of("SWEEP_BUDGET_US"),
            log_every_s=default_of("LOG_EVERY_S"),
            copy_every_s=default_of("COPY_EVERY_S") * (SLOWER_WHEN_COLD if options.cold_mib else 1),
            history_slots=default_of("HISTORY_SLOTS"),
        )
        hook_in()
        self._server = Hooked(self.clock)
        self._install()
        self._running: list[Any] = []
        self._lengths: dict[int, int] = {}  # by row: slots that it holds
        self._next: dict[int, int] = {}  # by row: what was sampled last
        self._numbers = 0
        self.steps = 0
        self.is_full = False  # the prefix cache has had to evict
        self._last: Any | None = None  # a decode whose result is not in yet
        batch = self._decode_batch([0] * options.requests, self._tensor([0] * options.requests))
        self._decoder = decoder(self.rig, batch)
        while len(self._running) < options.requests:
            self._admit()

    def _install(self) -> None:
        rig = self.rig
        allocator = HookedAllocator(rig.allocator, self.clock)
        context.watch_allocator(allocator, PoolKind.FULL)
        self._allocator = TimedAllocator(allocator)
        self._rows = HookedRows(rig.rows, self.clock)
        rig.tree.token_to_kv_pool_allocator = self._allocator
        context.recorder, context.history = rig.recorder, rig.history
        context.add(rig.manager, self._server)
        context.late_work = rig.manager.late  # as under overlap
        arguments = SimpleNamespace(enable_metrics=False)
        rig.manager.observers.extend(build_observers(rig.manager, arguments, None, None))
        rig.manager.attach_radix_cache(rig.tree)
        context.attend_farewell = Farewell(lambda: None, None).attend
        launcher = rig.manager.launcher
        launches = (
            lambda: warm_up_slot_events(launcher, 1),
            lambda: warm_up_joins(launcher, True),
            lambda: warm_up_next_tokens(launcher, False),
            lambda: warm_up_sweep(launcher),
        )
        rig.manager.warm_up((), launches)
        self._forward_stream = None
        if self._device == "cuda":
            self._forward_stream = torch.cuda.Stream()
            rig.manager.schedule_stream = torch.cuda.current_stream()

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _decode_batch(self, rows: Sequence[int], slots: torch.Tensor) -> ForwardBatch:
        lengths = [self._lengths.get(row, 0) for row in rows]
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=self._tensor([self._next.get(row, 0) for row in rows]),
            req_pool_indices=self._tensor(rows),
            seq_lens=self._tensor([length + 1 for length in lengths]),
            out_cache_loc=slots,
            seq_lens_sum=sum(lengths) + len(rows),
            positions=self._tensor(lengths),
        )

    # Requests

    def _admit(self) -> None:
        """A request is prefilled."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        was_running = self.clock.running
        self.clock.running = was_running and self.times_prefills
        tokens = [self._rng.randrange(VOCABULARY) for _ in range(self._rng.randint(*self.prompt))]
        self._numbers += 1
        request = Req(f"request-{self._numbers}", "", tokens, SamplingParams(max_new_tokens=64))
        request.fill_ids, request.last_node = list(tokens), self.rig.tree.root_node
        self.rig.rows.alloc([request])
        row = request.req_pool_idx
        slots = self._allocator.alloc(len(tokens))
        self.rig.rows.req_to_token[row, : len(tokens)] = slots.int()
        batch = self.rig._batch(ForwardMode.EXTEND, [row], tokens, range(len(tokens)), slots)
        for name, value in (
            ("extend_prefix_lens", 0),
            ("extend_seq_lens", len(tokens)),
            ("extend_start_loc", 0),
        ):
            setattr(batch, name, torch.tensor([value], dtype=torch.int32, device=self._device))
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = [0], [len(tokens)]
        self._lengths[row] = len(tokens)

        def forward() -> None:
            self.clock.cool()
            self.clock.start("before the layers")
            with self.rig.manager.bracket_model_forward(batch):
                self.clock.stop()
                self.rig._model(slots)
                self.clock.cool()
                self.clock.start("after the layers")
            self.clock.stop()

        prefill = self._launch([request], batch, forward)
        self._process(prefill, lambda: None)
        self._wait()
        self._running.append(request)
        self.clock.running = was_running

    def _end_one(self) -> None:
        """The oldest request ends, and its slots go to the prefix cache."""
        if self._rng.random() < self._options.replaced:
            self.clock.cool()
            release_kv_cache(self._running.pop(0), self)

    def give_back(self, request: Any) -> None:
        row = request.req_pool_idx
        request.kv_committed_len = self._lengths.pop(row)
        self.rig.tree.cache_finished_req(request)
        del self._next[row]
        self.clock.start("row given back")
        self._rows.free(request)

    def _make_room(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        room, wanted = self._allocator.available_size(), 0
        if room < self._least:
            wanted = self._spare - room
        elif room < self._spare and self._rng.random() < self._options.evicts:
            wanted = int(
                self._options.requests / self._options.evicts
            )  # what steps take, on average
        if wanted:
            self.is_full = True
            self.rig.tree.evict(EvictParams(num_tokens=wanted))

    # Steps

    def step(self) -> None:
        """A decode, and the result of the one before it, as under overlap."""
        self.steps += 1
        while len(self._running) < self._options.requests:
            self._admit()
        self.clock.cool()
        self._make_room()
        slots = alloc_for_decode(self._allocator, len(self._running))
        requests = list(self._running)
        rows = [request.req_pool_idx for request in requests]
        batch = self._decode_batch(rows, slots)
        self.rig.rows.req_to_token[batch.req_pool_indices, batch.positions] = slots.int()
        for row in rows:
            self._lengths[row] += 1
        launched = self._launch(requests, batch, lambda: self._decode(batch))
        if self._last is not None:
            self._process(self._last, self._end_one)
        self._last = launched
        self._wait()

    def _wait(self) -> None:
        """For the device: the copies of a step have arrived when the next one begins."""
        if self._forward_stream is not None:
            torch.cuda.synchronize()

    def _decode(self, batch: ForwardBatch) -> None:
        if not self._decoder.replays:
            self._decoder.run(batch)
            return
        self._server.inside["replay"] = lambda: self._decoder.run(batch)
        self.clock.cool()
        self.clock.start("replay")
        self._server.replay(batch)

    def _launch(self, requests: list[Any], batch: ForwardBatch, forward: Callable[[], None]) -> Any:
        """`run_batch`. Returns the scheduler's batch."""
        scheduled = SimpleNamespace(
            reqs=requests, forward_iter=self._numbers, forward_mode=batch.forward_mode
        )
        self._numbers += 1
        tokens = [self._rng.randrange(VOCABULARY) for _ in requests]

        def sample() -> torch.Tensor:
            sampled = self._tensor(tokens)
            for request, token in zip(requests, tokens, strict=True):
                self._next[request.req_pool_idx] = token
                request.output_ids.append(token)
            self.clock.cool()
            return sampled

        def run_batch() -> None:
            if self._forward_stream is not None:
                self._forward_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._forward_stream):  # None: does nothing
                self.clock.cool()
                self.clock.start("forward")
                self._server.forward(batch)
                self.clock.stop()
                self._server.sample(None, batch)
                self.clock.stop()

        self._server.inside.update(run_batch=run_batch, forward=forward, sample=sample)
        self.clock.cool()
        self.clock.start("run_batch")
        self._server.run_batch(scheduled)
        self.clock.stop()
        return scheduled

    def _process(self, scheduled: Any, then: Callable[[], None]) -> None:
        self._server.inside["process_batch_result"] = then
        self.clock.cool()
        self.clock.start("result")
        self._server.process_batch_result(scheduled, None)
        self.clock.stop()

    def settle(self) -> None:
        """Raises RuntimeError if anything was found: all of it would be false."""
        if self._last is not None:
            self._process(self._last, lambda: None)
        self._last = None
        found = self.rig.settle()
        if found:
            raise RuntimeError(f"expected no findings, got {len(found)}, the first: {found[0]}")


def alloc_for_decode(allocator: Any, count: int) -> torch.Tensor:
    """The canary's history names this function."""
    return allocator.alloc(count)


def release_kv_cache(req: Any, server: Server) -> None:
    """The same."""
    server.give_back(req)


Parts = list[tuple[dict[str, int], dict[str, int]]]  # per step: ns by entry, CPU and wall


def timed_steps(server: Server, steps: int) -> Parts:
    parts = []
    server.clock.running = True
    for _ in range(steps):
        server.step()
        parts.append(server.clock.take())
    server.clock.running = False
    server.settle()
    return parts


def measure(options: argparse.Namespace, mode: CanaryMode, decoder: Any) -> Parts:
    server = Server(options, mode, decoder)
    while not server.is_full or options.spare_steps > server.steps:
        server.step()
    return timed_steps(server, options.steps)


def _figures(values: list[int]) -> tuple[float, float]:
    """(median, lowest tenth) in us."""
    ordered = sorted(values)
    return statistics.median(ordered) / 1000, ordered[len(ordered) // 10] / 1000


def table(parts: Parts) -> dict[str, list[float]]:
    """CPU median, lowest tenth, wall median, lowest tenth, share of steps, by entry; "step": all of them.

    The figures of an entry are of the steps that have it.
    """
    rows: dict[str, list[float]] = {}
    entries = dict.fromkeys(name for cpu, _ in parts for name in cpu)
    for name in entries:
        having = [part for part in parts if name in part[0]]
        figures = [*_figures([p[0][name] for p in having]), *_figures([p[1][name] for p in having])]
        rows[name] = [round(f, 1) for f in figures] + [round(len(having) / len(parts), 2)]
    sums = [[sum(kind.values()) for kind in part] for part in parts]
    figures = [*_figures([cpu for cpu, _ in sums]), *_figures([wall for _, wall in sums])]
    rows["step"] = [round(f, 1) for f in figures] + [1.0]
    return rows


def parser_of(description: str) -> argparse.ArgumentParser:
    """Of the arguments that all benchmarks of hooks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--modes", default="raise,log")
    parser.add_argument("--steps", type=int, default=200, help="that are timed")
    parser.add_argument("--cold-mib", type=float, default=64.0, help="0 leaves the caches warm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--python", action="store_true", help="the host code in C is not used")
    parser.add_argument("--out", help="a JSON line per mode is appended to it")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument(
        "--spare-steps",
        type=int,
        default=SPARE_STEPS,
        help="before them, at least; they go on until the pool is full",
    )
    parser.add_argument("--replaced", type=float, default=0.8, help="share of steps, > 0")
    parser.add_argument("--evicts", type=float, default=0.4, help="share of steps")
    parser.add_argument("--sweep", type=int, default=20, help="steps between passes of the sweep")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, measured: Callable[[CanaryMode, Any], Parts]) -> None:
    torch.set_num_threads(1)
    if not options.python:
        begin_to_compile().join()  # as a server's start does
    print(f"host code in {'C' if HOST.in_c else 'Python'}")
    if options.device == "cpu":
        without_kernels.install()
    decoder = Graph if options.device == "cuda" else WithoutKernels
    for mode in map(CanaryMode, options.modes.split(",")):
        rows = table(measured(mode, decoder))
        print(f"mode {mode}, {options.steps} steps, us:")
        print(f"{'entry':<18}{'CPU':>8}{'lowest':>8}{'wall':>8}{'lowest':>8}{'steps':>7}")
        for name, figures in rows.items():
            print(
                f"{name:<18}" + "".join(f"{f:>8.1f}" for f in figures[:4]) + f"{figures[4]:>7.2f}"
            )
        sys.stdout.flush()
        if options.out:
            with Path(options.out).open("a") as file:
                file.write(json.dumps({**vars(options), "mode": str(mode), "us": rows}) + "\n")


def main() -> None:
    options = parse()
    run(options, lambda mode, decoder: measure(options, mode, decoder))


if __name__ == "__main__":
    main()
