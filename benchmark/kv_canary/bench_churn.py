"""Cost of the canary under churn: a full pool, shared prefixes, requests that come and go, evictions in every step.

    python benchmark/kv_canary/bench_churn.py MODEL_DIR [--pairs 5] [--requests 1200] [--clients 320]
        [--engine '{"max_total_tokens": 200000}'] [--profile] [--timeline] [--count N] [--out results.jsonl]

One server, in which the canary is taken out and put back between runs, see `bench_switch.py`. All requests of a run are
sent at once. The scheduler begins `--clients` of them, and one for each that ends (`churn_schedule.py`), so that the
two runs of a pair have the same batches, step by step. Prompts have 16 to 1,536 tokens, of which a part is shared.
Prints a JSON line per run and, last, the mean of the pairs' ratios with its 95 % interval: output tokens per second,
the median step, time to first token (TTFT) and time between tokens (ITL), median and p90. Times are taken in the
scheduler, from a request's begin to the results of its tokens. The first requests, as many as there are clients, and
what runs after the last begin are left out.
All runs have the same prompts. So each block of 20 steps has as many lengths as there are pairs, with the canary and
without it. On machines whose CPU is now fast and now slow, whole runs differ by tens of per cent. The fastest lengths
of each block differ less: their sums are compared as well, and again with each pair left out. (Single steps do not
serve for this: a result that comes late in one comes early in the next.)
Each line has mean steps by kind, and by what was launched in them: from result to result, the wait for the GPU, and
page faults of the scheduler's thread.
The host's share is the time in the canary's own code in the
scheduler's thread, per step. With `--profile`, one more run samples that thread's stack every millisecond, and says
where this time goes.
With `--timeline`, each line has the parts of a step on the host and the layers on the GPU (`step_timeline.py`).
With `--count N`, N more runs count every call and the time of each of the canary's functions there (`own_code.py`).
In runs without the canary its hooks are taken out, as in a server without `--kv-canary`. `--count-hooks N` counts what
is still called.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import signal
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import bench_switch
import own_code
import sglang_parts
import without_kernels
from churn_schedule import Schedule, Waits, follow, leave
from paired_ratios import interval_of_few
from turns import Turns, take_core

SAMPLE_S = 0.001
SEED = 1  # of the prompts of all runs but those that warm up
FAMILIES = 48  # of prompts that share a prefix
PROMPT = (16, 1536)  # tokens
SHARED = (0, 1024)
OUTPUT = (32, 256)
# Tokens between a request's answers. With one, the clients' process is as busy as the scheduler, and is measured, too.
STREAM_INTERVAL = 8

_BY_STEP = ("step_lengths", "step_waits", "step_extends", "token_steps")
# States of the canary in runs that count its calls
COUNTED = {"count": "all", "count-hooks": "off"}
BLOCK = 20  # steps
FIGURES = ("tokens_per_s", "step_p50", "ttft_p50", "ttft_p90", "itl_p50", "itl_p90", "itl_mean")


Pairs = list[tuple[dict[str, Any], dict[str, Any]]]  # lines of runs without the canary and with it


# In the scheduler process


@dataclass(slots=True)
class HostSamples:
    """Samples of the scheduler thread's stack that lie in the canary's own code."""

    total: int = 0
    ours: int = 0
    where: collections.Counter[str] = field(default_factory=collections.Counter)
    functions: collections.Counter[str] = field(default_factory=collections.Counter)  # with callees
    own: collections.Counter[str] = field(default_factory=collections.Counter)  # without them

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._sample)  # CPU time: other processes do not count
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        self.total += 1
        chain = []
        while frame is not None:
            path = frame.f_code.co_filename
            if "kv_canary" in path and path != __file__:
                chain.append(f"{Path(path).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
            elif "/sglang/" in path:
                break  # called by SGLang, or SGLang called by one of our hooks
            frame = frame.f_back
        if chain:
            self.ours += 1
            self.where[" < ".join(chain[:4])] += 1
            names = [name.rpartition(":")[0] for name in chain]
            self.functions.update(set(names))
            self.own[names[0]] += 1


def _us_a_step(samples: collections.Counter[str], steps: int) -> list[tuple[float, str]]:
    scale = SAMPLE_S * 1e6 / max(1, steps)
    return [(round(n * scale, 1), name) for name, n in samples.most_common(60)]


class Meter:
    """Steps, host time of the canary, and how often SGLang took running requests back, since the last call."""

    retractions = 0  # of the process

    def __init__(self, scheduler: Any) -> None:
        self._switch = bench_switch.CanarySwitch(scheduler)
        self._manager = self._switch._installed["managers"][0]
        self._samples: HostSamples | None = None
        self._counts: own_code.OwnCode | None = None
        self._forward_ct = scheduler.forward_ct
        self._spent = self._retractions = 0
        self.schedule: Schedule | None = None

    def to(self, scheduler: Any, state: str, path: str) -> None:
        """Write what was measured to `path`, then switch. `profile` is `all` with samples, COUNTED are with counts."""
        if self._samples is not None:
            self._samples.stop()
        steps = scheduler.forward_ct - self._forward_ct
        spent = self._manager.clock.spent_ns - self._spent
        line: dict[str, Any] = {"steps": steps, "clock_us_a_step": spent / 1000 / max(1, steps)}
        line["retractions"] = Meter.retractions - self._retractions
        if (samples := self._samples) is not None:
            line |= {
                "sampled_us_a_step": samples.ours * SAMPLE_S * 1e6 / max(1, steps),
                "share": samples.ours / max(1, samples.total),
                "functions": _us_a_step(samples.functions, steps),
                "own": _us_a_step(samples.own, steps),
                "where": _us_a_step(samples.where, steps),
            }
        if self._counts is not None:
            line |= self._counts.stop(steps)
        if self.schedule is not None:
            line |= self.schedule.figures()
            if self.schedule.timeline is not None:
                self.schedule.timeline.leave(scheduler)
            self.schedule = None
            leave(scheduler)
        if sglang_parts.tensor_parallel_rank(scheduler) == 0:
            Path(path).write_text(json.dumps(line))
        self._switch.to("all" if state == "profile" else COUNTED.get(state, state))
        self._forward_ct, self._spent = scheduler.forward_ct, self._manager.clock.spent_ns
        self._retractions = Meter.retractions
        self._samples = HostSamples() if state == "profile" else None
        if self._samples is not None:
            self._samples.start()
        self._counts = own_code.OwnCode() if state in COUNTED else None
        if self._counts is not None:
            self._counts.start()


def run_metered_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process with two more remote calls, `canary_to(state, path)` and `begin_schedule`."""
    from sglang.srt.managers import scheduler

    def canary_to(self: Any, state: str, path: str) -> None:
        if not hasattr(self, "_canary_meter"):
            self._canary_meter = Meter(self)
        self._canary_meter.to(self, state, path)

    def begin_schedule(self: Any, total: int, clients: int, timeline: bool) -> None:
        # Of several ranks the first one decides when requests come. The others follow it.
        turns = Turns.of_environment() if sglang_parts.tensor_parallel_rank(self) == 0 else None
        take_core(sglang_parts.tensor_parallel_rank(self))
        schedule = self._canary_meter.schedule = follow(self, Schedule(total, clients, turns))
        if timeline:
            schedule.follow_launches(self)

    _count_retractions()
    Waits.count()
    if os.environ.get(without_kernels.ENV):
        without_kernels.install()
    scheduler.Scheduler.canary_to = canary_to
    scheduler.Scheduler.begin_schedule = begin_schedule
    scheduler.run_scheduler_process(*args, **kwargs)


def _count_retractions() -> None:
    from sglang.srt.managers import schedule_batch

    retract = schedule_batch.ScheduleBatch.retract_decode

    def retract_decode(*args: Any, **kwargs: Any) -> Any:
        Meter.retractions += 1
        return retract(*args, **kwargs)

    schedule_batch.ScheduleBatch.retract_decode = retract_decode


# In the main process


class Prompts:
    """The same endless sequence for equal seeds."""

    def __init__(self, seed: int, options: argparse.Namespace) -> None:
        self._rng, self._options = random.Random(seed), options
        shared = random.Random(17)
        self._families = [
            [
                shared.randrange(10, options.vocabulary)
                for _ in range(shared.randint(*options.shared))
            ]
            for _ in range(FAMILIES)
        ]

    def next(self) -> tuple[list[int], int]:
        """(prompt, tokens to generate)."""
        rng, options = self._rng, self._options
        length = rng.randint(*options.prompt)
        prefix = rng.choice(self._families)[: length - 8]
        tail = [rng.randrange(10, options.vocabulary) for _ in range(length - len(prefix))]
        return prefix + tail, rng.randint(*options.output)


async def _ask(engine: Any, name: str, tokens: list[int], output: int) -> None:
    params = {"temperature": 0.0, "max_new_tokens": output, "ignore_eos": True}
    stream = await engine.async_generate(
        input_ids=tokens, sampling_params=params, stream=True, rid=name
    )
    async for _ in stream:
        pass


async def _traffic(engine: Any, seed: int, options: argparse.Namespace) -> None:
    prompts = Prompts(seed, options)
    asked = [(f"{seed}-{i:06d}", *prompts.next()) for i in range(options.requests)]
    await asyncio.gather(*[_ask(engine, *request) for request in asked])


def serve(engine: Any, state: str, seed: int, options: argparse.Namespace, path: str) -> None:
    bench_switch._empty(engine)
    engine.collective_rpc("canary_to", state=state, path=path)
    engine.collective_rpc(
        "begin_schedule",
        total=options.requests,
        clients=options.clients,
        timeline=options.timeline,
    )
    engine.loop.run_until_complete(_traffic(engine, seed, options))
    bench_switch._empty(engine)
    engine.collective_rpc("canary_to", state="off", path=path)


def _measure(
    engine: Any, state: str, seed: int, options: argparse.Namespace, path: str
) -> dict[str, Any]:
    serve(engine, state, seed, options, path)
    line = {"state": state, "seed": seed, **json.loads(Path(path).read_text())}
    tell(line, options)
    return line


def tell(line: dict[str, Any], options: argparse.Namespace) -> None:
    """Print a run, without its steps, and keep all of it."""
    print(json.dumps({k: v for k, v in line.items() if k not in _BY_STEP}), flush=True)
    if options.out:
        with open(options.out, "a") as file:
            file.write(json.dumps(line) + "\n")


def _fastest(pairs: Pairs) -> float:
    """Of each block of steps the fastest of all runs: how much longer their sum is with the canary, in per cent."""
    off, on = (sum(min(lengths) for lengths in _blocks(runs)) for runs in zip(*pairs, strict=True))
    return 100 * (on / off - 1)


def _blocks(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[float, ...]]:
    """Of each block, how long it took in each run."""
    lengths = [run["step_lengths"] for run in runs]
    starts = range(0, len(lengths[0]), BLOCK)
    return zip(*[[sum(run[i : i + BLOCK]) for i in starts] for run in lengths], strict=True)


def _table(pairs: Pairs) -> None:
    same = sum(off["batches"] == on["batches"] for off, on in pairs)
    print(f"{same} of {len(pairs)} pairs have the same batches")
    kinds = {run["batches"] for pair in pairs for run in pair}
    for name in (name for name in FIGURES if name in pairs[0][0]):
        ratios = [100 * (on[name] / off[name] - 1) for off, on in pairs]
        low, high = interval_of_few(ratios)
        off = statistics.median(off[name] for off, _ in pairs)
        mean = statistics.mean(ratios)
        print(f"{name:<14}{off:>12.5g}{mean:>+9.2f} % ({low:+.2f} to {high:+.2f})")
    if len(kinds) == 1 < len(pairs):  # blocks of all runs are compared, not those of a pair alone
        without_one = [_fastest(pairs[:i] + pairs[i + 1 :]) for i in range(len(pairs))]
        low, high = min(without_one), max(without_one)
        print(
            f"fastest blocks of {BLOCK} steps {_fastest(pairs):+.2f} % ({low:+.2f} to {high:+.2f})"
        )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """With what this benchmark and `bench_turns.py` have in common."""
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1200, help="of a run, in all")
    parser.add_argument("--clients", type=int, default=320)
    for name, default in (("prompt", PROMPT), ("shared", SHARED), ("output", OUTPUT)):
        shown = f"tokens of it, at least and at most; {default[0]} {default[1]} if not given"
        parser.add_argument(f"--{name}", type=int, nargs=2, default=default, help=shown)
    parser.add_argument("--vocabulary", type=int, default=1000, help="tokens of prompts are below")
    parser.add_argument("--engine", default="{}", help="further Engine arguments, JSON")
    parser.add_argument(
        "--without-kernels",
        action="store_true",
        help="on a CPU: launches are prepared and not run, so that the host time of versions can be compared",
    )
    parser.add_argument(
        "--timeline",
        action="store_true",
        help="means of a step's parts on the host, and of the GPU's time in and between layers; costs some us a step",
    )
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.without_kernels:
        os.environ[without_kernels.ENV] = "1"
    return options


def serving_engine(options: argparse.Namespace) -> Any:
    """A server whose scheduler is metered. Nothing is warm yet."""
    args = {
        **bench_switch.ENGINE_ARGS,
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 20,
        "max_total_tokens": 200_000,
        "max_running_requests": 256,
        "cuda_graph_max_bs": 256,
        "disable_piecewise_cuda_graph": True,
        "stream_interval": STREAM_INTERVAL,
        **(without_kernels.ENGINE_ARGS if options.without_kernels else {}),
        **json.loads(options.engine),
    }
    return bench_switch.switchable_engine(run_metered_scheduler, options.model, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--count", type=int, default=0, help="runs that count calls")
    parser.add_argument("--count-hooks", type=int, default=0, help="the same without the canary")
    options = parse(parser)
    engine = serving_engine(options)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "host.json")
        for state in ("off", "all"):  # capture, compile, warm up: SGLang compiles kernels, too
            serve(engine, state, 0, options, path)
        pairs = []
        for pair in range(1, options.pairs + 1):
            order = ("off", "all") if pair % 2 else ("all", "off")
            lines = {state: _measure(engine, state, SEED, options, path) for state in order}
            pairs.append((lines["off"], lines["all"]))
        if options.profile:
            _measure(engine, "profile", SEED, options, path)
        for state in ("count",) * options.count + ("count-hooks",) * options.count_hooks:
            _measure(engine, state, SEED, options, path)
    engine.shutdown()
    if pairs:
        _table(pairs)


if __name__ == "__main__":
    main()
