"""Cost of the canary where KV travels: bytes on the wire, time to first token over disaggregation, HiCache's load-back.

    python benchmark/kv_canary/bench_disaggregation.py [--parts wire,ttft,load] [--model DIR] [--pairs 10]
        [--requests 10] [--seconds 300] [--prompt 200] [--tokens 4] [--backend nixl] [--prefill '{}']
        [--engine '{"mem_fraction_static": 0.2}'] [--decode '{"base_gpu_id": 1}'] [--noise] [--breakdown]
        [--hicache '{"hicache_ratio": 2.5}'] [--pin]

Servers are real, on this machine: without a GPU, the smallest model on a CPU. All start at once, before the first is
measured, and then take turns by request. In each pair every server gets the same `--requests` prompts, one at a time,
and its figure is their median. `off2` is `off` once more (--noise): how far it is from `off` is the noise. Content is
`all`. Prints a JSON line for each pair and part, and last mean and median of the pairs' ratios with their 95 %
intervals (bootstrap). After `--seconds` of measuring no pair of that part begins. `--breakdown` adds tables of where
the time of a request goes, of the faster and of the slower half of all requests (`spans.py`). Noting it costs time.
`--pin` gives each server, or each pair of servers, cores of its own. Idle schedulers poll, so two on one core slow each
other for as long as they stay there.

wire   bytes that the prefill server gives to the transport, by what they are
ttft   seconds until the decode server has streamed the first token, and until the last of --tokens. The prefill and the
       transfer are in the first, the check of what has arrived is in the second
load   seconds until a server with HiCache has answered a prompt that it must load back from host memory, with one
       token; and the `e2e_latency` that it names, without reading and parsing the request. Five prompts take turns, of
       which three fit on the device
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
from paired_ratios import summary

from sglang_kv_canary.environ import PERTURB_DIR
from sglang_kv_canary.testing import CanaryServer
from sglang_kv_canary.testing.hicache_mode import FILL_INS, SMALL_POOL
from sglang_kv_canary.testing.mode_config import MODES, ModeConfig
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary_rigs.hicache_serving import ask, hits
from sglang_kv_canary_rigs.pd_serving import PdServing, load_transport
from sglang_kv_canary_rigs.spans import SPAN_FILE, halves, note_spans, read_spans, table
from sglang_kv_canary_rigs.wire_bytes import (
    KV,
    NOTICES,
    OTHERS,
    RECORDS,
    WIRE_FILE,
    bytes_sent,
    count_bytes,
)

CANARY = {"kv_canary": "log", "kv_canary_real_data": "all"}
WITHOUT = {"kv_canary": "none", "kv_canary_real_data": "none"}
# Servers of tests look for commands before each forward, if they have the canary.
NO_FAULTS = {PERTURB_DIR.name: ""}
PARTS = ("wire", "ttft", "load")
FIGURES = {"ttft": ("first token", "last token"), "load": ("answer", "e2e_latency")}
WARM_UP = 3  # prompts of each server that are not counted
CACHED = 5  # prompts of which all are in host memory
ON_DEVICE = 3  # of them
ONE_TOKEN = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}

# (server, request id, prompt): seconds until the answer begins and, if it is longer, ends
Measure = Callable[[Any, str, list[int]], tuple[float, ...]]
Times = dict[str, list[tuple[float, float]]]  # of each server's requests, start and end


def variants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    both = {"off": WITHOUT, "on": CANARY}
    return {**both, "off2": WITHOUT} if options.noise else both


def mode_of(options: argparse.Namespace) -> ModeConfig:
    mode = MODES[options.mode]
    if options.model is None:
        return mode
    real = {**mode.server_args, "load_format": "auto", **_pool_of(options)}
    return replace(mode, write_model=lambda _: options.model, server_args=real)


def _pool_of(options: argparse.Namespace) -> dict[str, Any]:
    """In place of the pool of the smallest model."""
    return {
        "chunked_prefill_size": max(8192, options.prompt),
        "context_length": None,
        "max_total_tokens": 8 * options.prompt,
    }


def pair_of_servers(
    options: argparse.Namespace,
    flags: Mapping[str, Any],
    folder: Path,
    name: str = "on",
    plugins: Sequence[Callable[[], None]] = (),
) -> PdServing:
    class Pair(PdServing):
        backend = options.backend
        prefill_flags = options.prefill
        decode_flags = options.decode
        prefill_env: ClassVar = {
            **NO_FAULTS,
            WIRE_FILE: str(folder / "wire"),
            SPAN_FILE: str(folder / f"{name} prefill"),
        }
        decode_env: ClassVar = {
            **NO_FAULTS,
            WIRE_FILE: str(folder / "unused"),
            SPAN_FILE: str(folder / f"{name} decode"),
        }

    flags = {**flags, "disable_radix_cache": True, **options.engine}
    return Pair(mode_of(options), flags, plugins=(*plugins, *spans_of(options)))


def spans_of(options: argparse.Namespace) -> tuple[Callable[[], None], ...]:
    return (note_spans,) if options.breakdown else ()


def answer(tokens: int, serving: PdServing, name: str, prompt: list[int]) -> tuple[float, ...]:
    times, got = serving.run(serving.stream(name, prompt, tokens))
    if len(got) != tokens:
        raise RuntimeError(f"expected {tokens} tokens, got {len(got)}:\n{serving.stderr}")
    return times[0], times[-1]


# Parts


def wire(options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        serving = stack.enter_context(
            pair_of_servers(options, CANARY, folder, plugins=(count_bytes,))
        )
        for i, prompt in enumerate(prompts_of("wire", options.requests, options)):
            answer(1, serving, f"wire-{i}", prompt)
        sent = bytes_sent(folder / "wire")
    print(json.dumps({"part": "wire", **added_bytes(sent, options)}), flush=True)


def added_bytes(sent: Mapping[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """What the canary adds to transfers of `options.requests` prompts of `options.prompt` tokens."""
    tokens, halves = options.requests * options.prompt, len(MODES[options.mode].halves)
    return {
        "tokens": tokens,
        "halves": halves,
        "kv_bytes": sent[KV],
        "other_bytes": sent[OTHERS],
        "record_bytes_per_token_and_half": sent[RECORDS] / tokens / halves,
        "notice_bytes_per_request": sent[NOTICES] / options.requests,
        "added_bytes_per_token_and_half": (sent[RECORDS] + sent[NOTICES]) / tokens / halves,
    }


def ttft(options: argparse.Namespace) -> None:
    with ExitStack() as servers:
        folder = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        pairs = {
            name: pair_of_servers(options, flags, folder, name)
            for name, flags in variants(options).items()
        }
        start_together(servers, pairs, options.pin)
        measure = functools.partial(answer, options.tokens)
        for i, prompt in enumerate(prompts_of("ttft-warm", WARM_UP, options)):
            for serving in pairs.values():
                measure(serving, f"warm-{i}", prompt)
        _compare("ttft", pairs, measure, options, folder)


def load(options: argparse.Namespace) -> None:
    """Prompts in turns: each is pushed out of the device before it is asked for again."""
    cached = prompts_of("load", CACHED, options)
    with ExitStack() as servers:
        folder = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        single = {
            name: CanaryServer(
                mode_of(options),
                hicache_flags(options, flags),
                env={**NO_FAULTS, SPAN_FILE: str(folder / name)},
                plugins=(*FILL_INS, *spans_of(options)),
            )
            for name, flags in variants(options).items()
        }
        start_together(servers, single, options.pin)
        for name in ("first", "second"):  # the second time warms up what loads
            for i, prompt in enumerate(cached):
                for serving in single.values():
                    ask(serving, f"{name}-{i}", prompt)
        _compare("load", single, load_back, options, folder, cached)


def hicache_flags(options: argparse.Namespace, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Of a server with HiCache: `ON_DEVICE` prompts fit on the device."""
    pool = {**SMALL_POOL, "max_total_tokens": ON_DEVICE * options.prompt + 20}
    return {**options.engine, **pool, **options.hicache, **flags}


def start_together(stack: ExitStack, servers: Mapping[str, Any], pinned: bool = False) -> None:
    """On a GPU a start takes a minute or more. `pinned`: to cores of its own, once all have compiled on all of them."""
    with ThreadPoolExecutor(len(servers)) as threads:
        starts = [threads.submit(stack.enter_context, server) for server in servers.values()]
    for start in starts:
        start.result()
    if pinned:
        shares = shares_of(sorted(os.sched_getaffinity(0)), len(servers))
        for server, cores in zip(servers.values(), shares, strict=True):
            pin(server, cores)


def pin(server: Any, cores: Sequence[int]) -> None:
    """All threads of a server, or of both servers of a pair. What they start later inherits it."""
    both = [server, *filter(None, [getattr(server, "prefill", None)])]
    for process in (each.process for each in both):
        for member in (psutil.Process(process.pid), *psutil.Process(process.pid).children(True)):
            for thread in member.threads():
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(thread.id, cores)


def shares_of(cores: Sequence[int], count: int) -> list[Sequence[int]]:
    """`count` runs of as many cores, and at least one left for this process, which asks. Raises ValueError.

    Runs are of an even length where they can be: neighbours are often two threads of one core.
    """
    each = (len(cores) - 1) // count
    if each < 1:
        raise ValueError(
            f"--pin needs a core for each of {count} servers and one more, got {len(cores)} cores: leave it out"
        )
    each -= each % 2 if each > 1 else 0
    return [cores[each * i : each * (i + 1)] for i in range(count)]


def load_back(serving: CanaryServer, name: str, prompt: list[int]) -> tuple[float, float]:
    start = time.perf_counter()
    answer = ask(serving, name, prompt, sampling_params=ONE_TOKEN)
    return time.perf_counter() - start, latency_of_load(answer, prompt)


def latency_of_load(answer: dict[str, Any], prompt: list[int]) -> float:
    """Its `e2e_latency`, in seconds. Raises RuntimeError if the prompt was not loaded from host memory."""
    if hits(answer) < len(prompt) // 2:
        raise RuntimeError(
            f"expected a prefix from host memory, got {hits(answer)} of {len(prompt)} tokens"
        )
    return answer["meta_info"]["e2e_latency"]


# Turns


def prompts_of(name: str, count: int, options: argparse.Namespace) -> list[list[int]]:
    rng = random.Random(name)
    return [random_tokens(rng, options.prompt) for _ in range(count)]


def _compare(
    part: str,
    servers: Mapping[str, Any],
    measure: Measure,
    options: argparse.Namespace,
    folder: Path,
    prompts: list[list[int]] | None = None,
) -> None:
    """`prompts` take turns. None: every prompt is another one. `folder`: where servers write their spans."""
    times: Times = {name: [] for name in servers}
    lines = list(_turns(part, servers, measure, options, prompts, times))
    for name in servers:
        for at, figure in enumerate(FIGURES[part]):
            if name != "off":
                summary(
                    f"{part}, {figure},", name, [{n: line[n][at] for n in line} for line in lines]
                )
        print(f"{part} {name}: {_spread(times[name])}")
    if options.breakdown:
        time.sleep(1)  # idle servers write what they have noted
        _break_down(part, folder, times)


def _spread(times: list[tuple[float, float]]) -> str:
    milliseconds = [1000 * (end - start) for start, end in times]
    tenths = statistics.quantiles(milliseconds, n=10, method="inclusive")
    return "tenths of requests, ms: " + " ".join(f"{tenth:.1f}" for tenth in tenths)


def _break_down(part: str, folder: Path, times: Times) -> None:
    for role in ("prefill", "decode") if part == "ttft" else ("",):
        files = {n: folder / f"{n} {role}".strip() for n in times if n != "off2"}
        parts = {name: halves(read_spans(file), times[name]) for name, file in files.items()}
        named = {
            f"{n} {half}": figures for n, some in parts.items() for half, figures in some.items()
        }
        print(f"\n{part} {role}\n{table(named)}", flush=True)


def _turns(
    part: str,
    servers: Mapping[str, Any],
    measure: Measure,
    options: argparse.Namespace,
    prompts: list[list[int]] | None,
    times: Times,
) -> Iterator[dict[str, tuple[float, ...]]]:
    """Of each pair, what `measure` gives of each server. Turns are by request, so that the machine's drift hits all."""
    names, end = list(servers), time.monotonic() + options.seconds
    same = itertools.cycle(prompts) if prompts else None
    for pair in range(options.pairs):
        if time.monotonic() > end:
            return
        seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
        others = same or prompts_of(f"{part}-{pair}", options.requests, options)
        for i, prompt in enumerate(itertools.islice(others, options.requests)):
            first = (pair + i) % len(names)
            for name in names[first:] + names[:first]:
                start = time.perf_counter()
                found = measure(servers[name], f"{part}-{pair}-{i}", prompt)
                seconds[name].append(found)
                times[name].append((start, start + found[0]))
        line = {
            name: tuple(statistics.median(each) for each in zip(*values, strict=True))
            for name, values in seconds.items()
        }
        print(json.dumps({"part": part, "pair": pair, **line}), flush=True)
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--mode", default="mha", choices=("mha", "mla"), help="kind of pool")
    parser.add_argument("--model", help="folder; default: the smallest model of that kind")
    parser.add_argument("--backend", default="mooncake", choices=("mooncake", "nixl"))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--requests", type=int, default=10, help="of each server in a pair")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of each part")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--tokens", type=int, default=4, help="of an answer of the part ttft")
    for name in ("engine", "prefill", "decode", "hicache"):
        parser.add_argument(f"--{name}", type=json.loads, default={}, help="further flags, JSON")
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--breakdown", action="store_true")
    parser.add_argument("--pin", action="store_true", help="servers to cores of their own")
    options = parser.parse_args()
    if options.pin:
        try:
            shares_of(sorted(os.sched_getaffinity(0)), len(variants(options)))
        except ValueError as error:
            parser.error(str(error))
    load_transport()
    parts = {"wire": wire, "ttft": ttft, "load": load}
    unknown = set(options.parts.split(",")) - set(parts)
    if unknown:
        parser.error(f"expected parts out of {', '.join(parts)}, got {', '.join(sorted(unknown))}")
    for name in options.parts.split(","):
        parts[name](options)


if __name__ == "__main__":
    main()
