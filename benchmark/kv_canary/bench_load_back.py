"""Cost of the canary where HiCache loads a prompt back from host memory, with everything else equal: one server.

    python benchmark/kv_canary/bench_load_back.py [--model DIR] [--prompt 200] [--rounds 10] [--requests 15]
        [--seconds 300] [--content all] [--mode mha] [--engine '{"max_running_requests": 2}']
        [--hicache '{"hicache_ratio": 2.5}']

Two servers that differ in nothing differ by several per cent here: by their cores, and by where their memory lies. In
this one the canary is taken out and put back between runs, see `bench_switch.py`. Without a GPU the server has the
smallest model on a CPU. A round has one run of each state, in rotating order: `off`, `on`, and `off2`, which is `off`
once more. How far `off2` is from `off` is the noise.

A run begins with both tiers empty. Five prompts take turns, of which three fit on the device. To warm up, each is asked
for twice. Then `--requests` requests, one at a time, must load theirs from host memory, and have one token each. The
figures of a run are the medians of their times: `answer` by the clock of this process, and the `e2e_latency` that
SGLang names. A run fails if the canary has done nothing while it was in, if it has done anything while it was out, or
if it has found anything. After `--seconds` no round begins. The first round compiles, and does not count.

Prints a JSON line for each round. Last come mean and median of the rounds' ratios to `off` with their 95 % intervals
(bootstrap). `off` still costs the hooks themselves: SGLang's plugin framework calls about two dozen of them for each
prompt, and they return at their first lines. All states have the memory of the records.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import bench_switch
from bench_disaggregation import (
    CACHED,
    FIGURES,
    NO_FAULTS,
    ONE_TOKEN,
    hicache_flags,
    latency_of_load,
    mode_of,
    prompts_of,
)
from paired_ratios import summary

from sglang_kv_canary.testing.hicache_mode import FILL_INS
from sglang_kv_canary.testing.serving import CanaryEngine

STATES = ("off", "on", "off2")
WARM_UPS = 2  # the second one loads from host memory

Work = Mapping[str, int]
Times = tuple[float, ...]  # seconds, of each figure


# In the scheduler process


def run_switchable_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process with one more remote call, `canary_to(state, path)`."""
    from sglang.srt.managers import scheduler

    def canary_to(self: Any, state: str, path: str) -> None:
        """Write what the canary has done so far to `path`, then switch."""
        if not hasattr(self, "_canary_switch"):
            self._canary_switch = bench_switch.CanarySwitch(self)
        switch = self._canary_switch
        switch.settle()
        Path(path).write_text(json.dumps(switch.work()))
        switch.to(state)

    scheduler.Scheduler.canary_to = canary_to
    scheduler.run_scheduler_process(*args, **kwargs)


# In the main process


class SwitchableServing(CanaryEngine):
    """With HiCache."""

    def start(self) -> Any:
        args = dict(self.server_args)
        return bench_switch.switchable_engine(
            run_switchable_scheduler, args.pop("model_path"), args
        )

    def switch(self, state: str) -> dict[str, int]:
        """Empty both tiers, and switch. Returns what the canary has done until then, since the start."""
        bench_switch._empty(self.engine)
        path = self.folder / "work.json"
        self.engine.collective_rpc("canary_to", state=state, path=str(path))
        return json.loads(path.read_text())

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        return self.engine.generate(input_ids=prompt, sampling_params=ONE_TOKEN)


def rounds_of(serving: SwitchableServing, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of each round, the times of each state."""
    cached, end = prompts_of("load", CACHED, options), float("inf")
    contents = {"on": options.content}
    for number in range(options.rounds + 1):
        if number == 1:
            end = time.monotonic() + options.seconds
        if time.monotonic() > end:
            return
        times: dict[str, Times] = {}
        turn = number % len(STATES)
        for state in STATES[turn:] + STATES[:turn]:
            before = serving.switch(contents.get(state, state))
            times[state] = run(serving, cached, options.requests)
            after = serving.switch("off")
            refuse_wrong_work(state, before, after, options.requests * options.prompt // 2)
        if number:
            yield {"round": number, **{state: times[state] for state in STATES}}


def run(serving: SwitchableServing, cached: list[list[int]], requests: int) -> Times:
    """The medians."""
    for prompt in cached * WARM_UPS:
        serving.ask(prompt)
    measured = [load_back(serving, p) for p in itertools.islice(itertools.cycle(cached), requests)]
    return tuple(statistics.median(each) for each in zip(*measured, strict=True))


def load_back(serving: SwitchableServing, prompt: list[int]) -> Times:
    start = time.perf_counter()
    answer = serving.ask(prompt)
    return time.perf_counter() - start, latency_of_load(answer, prompt)


def refuse_wrong_work(state: str, before: Work, after: Work, least: int) -> None:
    """Raises RuntimeError unless the canary has done between `before` and `after` what it should in `state`.

    `least`: tokens that were loaded from host memory.
    """
    done = {name: after[name] - before[name] for name in before}
    if state != "on":
        if any(done.values()):
            raise RuntimeError(f"expected no work of the canary in state {state}, got {done}")
        return
    if min(done["checked"], done["loaded"]) < least or not done["written_back"]:
        raise RuntimeError(f"expected {least} slots or more, loaded and checked, got {done}")
    if any(done[name] for name in ("violations", "internal_errors", "refused")):
        raise RuntimeError(f"expected no finding of the canary, got {done}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="mha", choices=("mha", "mla"), help="kind of pool")
    parser.add_argument("--model", help="folder; default: the smallest model of that kind")
    parser.add_argument("--content", default="all", choices=bench_switch.CONTENTS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=15, help="of each state in a round")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all rounds")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    for name in ("engine", "hicache"):
        parser.add_argument(f"--{name}", type=json.loads, default={}, help="further flags, JSON")
    options = parser.parse_args()
    canary = {"kv_canary": "log", "kv_canary_real_data": options.content}
    lines = []
    flags = hicache_flags(options, canary)
    with SwitchableServing(mode_of(options), flags, NO_FAULTS, FILL_INS) as serving:
        for line in rounds_of(serving, options):
            lines.append(line)
            print(json.dumps(line), flush=True)
    for at, figure in enumerate(FIGURES["load"]):
        for state in STATES[1:]:
            pairs = [{name: line[name][at] for name in STATES} for line in lines]
            summary(f"load, {figure},", state, pairs)


if __name__ == "__main__":
    main()
