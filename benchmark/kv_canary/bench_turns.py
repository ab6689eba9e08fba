"""Cost of the canary, or of a version of it, from two servers that run by turns: some steps of one, then of the other.

    python benchmark/kv_canary/bench_turns.py MODEL_DIR [--pairs 3] [--block 20] [--content all] [--base SITE] [...]

Both servers are on one GPU, or with `--gpus-each` on GPUs of their own. They answer the same requests with the same
batches, see `bench_churn.py`. While one runs its steps the other one waits, and its clock stands still. So slow phases
of the machine's CPU, which last for seconds, slow both. Two servers that differ in nothing differ by up to 1 %. So each
pair is two runs: the canary is in the first server and then in the second one. The mean of the two has no such
difference left.
Most of what differs between two runs is a few turns in which one of them was slow. So turns are compared as well: the
mean of their differences without the fifth at either end, and what 95 % of draws of turns have.
`--content none` is the canary with records only. Other settings come from the environment and from `--engine`.
Quantiles of the times between tokens jump, and their mean (`itl_mean`) does not. So tokens are also compared with
themselves: all of them (`itl_all_same`), and those near the quantiles (`same_tokens.py`).
With `--base SITE` the canary is in both servers, and the second one imports it from that folder, which holds an older
version as it is installed. A pair is then a run with the canary in both, and one without it in either. The figures are
those of this version against that one, less what the servers differ by without a canary. An older version that leaves
its hooks in place counts as its server there.
Prints a JSON line per run and, last, the mean of the pairs with its 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_churn
import same_tokens
import turns
from bench_churn import FIGURES, SEED, run_metered_scheduler
from bench_switch import CONTENTS
from paired_ratios import interval_of_few, trimmed

Pair = tuple[dict[str, Any], dict[str, Any]]

ANSWER = "answer of bench_turns: "
COMPARED = ("seconds", *FIGURES)
__all__ = ["run_metered_scheduler"]  # SGLang's processes look for it in the main module


# In the process of a server


def _serve_turns(options: argparse.Namespace) -> None:
    """Each line on standard input is a run: its state and its seed."""
    engine = bench_churn.serving_engine(options)
    print(ANSWER + "{}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "host.json")
        for line in sys.stdin:
            state, seed = json.loads(line)
            bench_churn.serve(engine, state, seed, options, path)
            print(ANSWER + Path(path).read_text(), flush=True)
    engine.shutdown()


# In the main process


@dataclass(frozen=True, slots=True)
class Server:
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, place: int, folder: Path, options: argparse.Namespace) -> Server:
        setting = turns.Setting(folder, place, options.block, options.cores)
        environment = {**os.environ, **setting.environment()}
        if options.gpus_each:
            visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
            own = visible[place * options.gpus_each : (place + 1) * options.gpus_each]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        if options.base and place == 1:
            path = os.pathsep.join(filter(None, (options.base, os.environ.get("PYTHONPATH"))))
            environment["PYTHONPATH"] = path
        command = [sys.executable, __file__, *sys.argv[1:], "--serve"]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return cls(process)

    def ask(self, state: str, seed: int) -> None:
        print(json.dumps([state, seed]), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
            print(line, end="", file=sys.stderr)
        raise RuntimeError(
            f"a server has ended with code {self.process.wait()}; see what it said above"
        )

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def _run(
    servers: Sequence[Server], states: Sequence[str], seed: int, block: int
) -> list[dict[str, Any]]:
    """Raises RuntimeError for runs that cannot be compared, turn by turn."""
    for server, state in zip(servers, states, strict=True):
        server.ask(state, seed)
    runs = [server.answer() for server in servers]
    if runs[0]["batches"] != runs[1]["batches"]:
        raise RuntimeError(
            "expected the same batches in both servers, got others; leave out what ends requests by their tokens"
        )
    if not _turns_of(runs[0], block):
        steps = runs[0]["window_steps"]
        raise RuntimeError(f"expected a whole turn of {block} steps, got {steps}; lower --block")
    return runs


def _log_ratios(runs: Sequence[dict[str, Any]], on: int) -> dict[str, float]:
    """Of the figures that the runs have. Answers of one token have no time between tokens."""
    compared = [name for name in COMPARED if name in runs[0]]
    ratios = {name: math.log(runs[on][name] / runs[1 - on][name]) for name in compared}
    return ratios | same_tokens.log_ratios(runs[1 - on], runs[on])


def _table(ratios: Sequence[dict[str, float]], baseline: Sequence[dict[str, Any]]) -> None:
    """`baseline`: the runs without the canary, or with the older version."""
    for name in ratios[0]:
        percent = [100 * math.expm1(ratio[name]) for ratio in ratios]
        low, high = interval_of_few(percent)
        part = same_tokens.PARTS.get(name)
        figure = name if part is None else part.figure
        of = statistics.median(run[figure] for run in baseline)
        print(
            f"{name:<14}{of:>12.5g}{statistics.mean(percent):>+9.2f} % ({low:+.2f} to {high:+.2f})"
        )
    step = 1e6 * statistics.median(run["seconds"] / run["window_steps"] for run in baseline)
    more = statistics.mean(math.expm1(ratio["seconds"]) for ratio in ratios) * step
    print(f"a step {step:.0f} us, {more:+.0f} us")


def _turns_of(run: dict[str, Any], block: int) -> list[float]:
    """us a step in each whole turn of the window."""
    lengths, first = run["step_lengths"], -run["first_step"] % block
    starts = range(first, len(lengths) - block + 1, block)
    return [1e6 * statistics.mean(lengths[start : start + block]) for start in starts]


def _table_of_turns(groups: Sequence[Sequence[Pair]], weights: Sequence[float], block: int) -> None:
    """`groups`: pairs (before, after) of runs at once. The figure is the sum of their differences by `weights`."""
    differences = []
    for pairs in groups:
        turns_of_pairs = [[_turns_of(run, block) for run in pair] for pair in pairs]
        both = [zip(off, on, strict=True) for off, on in turns_of_pairs]
        differences.append([on - off for turns_of_pair in both for off, on in turns_of_pair])
    draws, figures = random.Random(0), []
    for _ in range(2000):
        drawn = [draws.choices(each, k=len(each)) for each in differences]
        figures.append(_weighted(weights, drawn))
    figures.sort()
    found = _weighted(weights, differences)
    compared = [pairs for pairs, weight in zip(groups, weights, strict=True) if weight > 0]
    step = statistics.median(
        us for pairs in compared for before, _ in pairs for us in _turns_of(before, block)
    )
    us = found, figures[50], figures[-51]
    percent = [100 * each / step for each in us]
    print(
        f"{sum(map(len, differences))} turns of {block} steps, {step:.0f} us a step: "
        "{:+.0f} us ({:+.0f} to {:+.0f}), ".format(*us)
        + "{:+.2f} % ({:+.2f} to {:+.2f})".format(*percent)
    )


def _weighted(weights: Sequence[float], groups: Sequence[Sequence[float]]) -> float:
    return sum(w * trimmed(each) for w, each in zip(weights, groups, strict=True))


def _tell_runs(
    runs: Sequence[dict[str, Any]], states: Sequence[str], options: argparse.Namespace
) -> None:
    for state, run in zip(states, runs, strict=True):
        bench_churn.tell({"state": state, **run}, options)


def _compare_versions(servers: Sequence[Server], options: argparse.Namespace) -> None:
    ratios, servers_differ = [], []
    groups: tuple[list[Pair], list[Pair]] = [], []  # the canary is in both servers, in neither
    for _ in range(options.pairs):
        found = []
        for state, names, pairs in (
            (options.content, ("this", "base"), groups[0]),
            ("off", ("off", "off"), groups[1]),
        ):
            runs = _run(servers, (state, state), SEED, options.block)
            _tell_runs(runs, names, options)
            found.append(_log_ratios(runs, 0))
            pairs.append((runs[1], runs[0]))
        versions, without = found
        ratios.append({name: versions[name] - without[name] for name in versions})
        servers_differ.append(without["seconds"])
    _tell_difference(servers_differ)
    _table(ratios, [base for base, _ in groups[0]])
    _table_of_turns(groups, (1.0, -1.0), options.block)


def _tell_difference(logs: Sequence[float]) -> None:
    difference = 100 * statistics.mean(map(math.expm1, logs))
    print(f"the first server against the second: {difference:+.2f} % of seconds")


def _compare_states(servers: Sequence[Server], options: argparse.Namespace) -> None:
    ratios, servers_differ = [], []
    groups: tuple[list[Pair], list[Pair]] = (
        [],
        [],
    )  # the canary is in the first server, in the second one
    for _ in range(options.pairs):
        first, second = {}, {}
        for on, found in ((0, first), (1, second)):
            states = (options.content, "off") if on == 0 else ("off", options.content)
            runs = _run(servers, states, SEED, options.block)
            _tell_runs(runs, states, options)
            found |= _log_ratios(runs, on)
            groups[on].append((runs[1 - on], runs[on]))
        ratios.append({name: (first[name] + second[name]) / 2 for name in first})
        servers_differ.append((first["seconds"] - second["seconds"]) / 2)
    _tell_difference(servers_differ)
    _table(ratios, [off for pairs in groups for off, _ in pairs])
    _table_of_turns(groups, (0.5, 0.5), options.block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--block", type=int, default=20, help="steps of a turn")
    parser.add_argument("--content", choices=CONTENTS, default="all")
    parser.add_argument(
        "--base", help="folder with an older version, which the second server imports"
    )
    parser.add_argument(
        "--gpus-each",
        type=int,
        default=0,
        help="each server has so many GPUs of CUDA_VISIBLE_DEVICES to itself; 0: both have all",
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = bench_churn.parse(parser)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if options.gpus_each and len(visible) < 2 * options.gpus_each and not options.serve:
        parser.error(
            f"--gpus-each {options.gpus_each} needs CUDA_VISIBLE_DEVICES with {2 * options.gpus_each} GPUs"
        )
    if options.serve:
        _serve_turns(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        turns.make_folder(Path(folder))
        options.cores = turns.keep_cores(json.loads(options.engine).get("tp_size", 1))
        servers = [Server.start(place, Path(folder), options) for place in (0, 1)]
        for server in servers:
            server.answer()
        # Capture, compile, warm up: SGLang compiles kernels, too
        for state in ("off", options.content):
            _run(servers, (state, state), 0, options.block)
        (_compare_versions if options.base else _compare_states)(servers, options)
        for server in servers:
            server.end()


if __name__ == "__main__":
    main()
