"""GPU time of one decode step's CUDA graph in a real server, with and without the canary: what each step pays.

    python benchmark/kv_canary/bench_graph.py MODEL_DIR [--content none,partial,all] [--cases 1x512 64x256 128x512]
        [--captures 6] [--replays 20] [--profile] [--variants off on] [--engine '{}'] [--out results.jsonl]

In the middle of a generation the scheduler captures the step's graph anew, `captures` times in each variant and in
random order, and replays each on the inputs of the step at hand: same process, weights, slots and batch. Two captures
of the same graph differ (where their memory lies), so the spread over captures is the noise. Variants:

    off            SGLang's own graph
    off+fork       the same with an empty second branch beside the layers: what having one changes by itself
    on             with the canary, as the server captures it
    on+mark        with the canary, and a fill of one word before the branch begins. The model's first kernel can stay
                   on the fill's hardware queue
    on-all         with the canary, and as much as possible beside the layers: not so where servers have several ranks
    on-end-in-line with the canary, the end of the step in line, as for models whose layers have no known end
    on-in-line     with the canary, without a branch

A case is BATCHxINPUT; the prefix is a little longer than the input. What lies outside of graphs is not in here (frees,
the copy to the host, host work); see bench_switch.py. `--profile` adds the kernels' summed time, the gaps between,
what comes before the first and after the last kernel of others, and when each kernel of the canary begins and ends.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import sglang_parts
from bench_switch import ENGINE_ARGS, innermost, switchable_engine
from sglang_parts import Captured

VARIANTS = ("off", "off+fork", "on", "on+mark", "on-all", "on-end-in-line", "on-in-line")
OWN_KERNELS = ("forward_kernel", "strided_kernel", "content_kernel", "publish_kernel")
PROFILED = 4  # replays
AT_STEP = 20  # decode steps into the generation
NEW_TOKENS = 40
ROUNDS = 3


# In the scheduler process


def run_measuring_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process with one more remote call, `canary_measure(**job)`, for the next generation."""
    from sglang.srt.managers import scheduler

    def measure(self: Any, **job: Any) -> None:
        runner, steps = sglang_parts.decode_runner(self.tp_worker.model_runner), 0
        replay = getattr(runner, sglang_parts.REPLAY)

        def replay_and_measure(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            result = replay(forward_batch, *args, **kwargs)
            steps += 1
            if steps == AT_STEP:
                delattr(runner, sglang_parts.REPLAY)
                measured = _measure(runner, forward_batch, job)  # ranks must do it together
                if sglang_parts.tensor_parallel_rank(self) == 0:
                    Path(job["answer"]).write_text(json.dumps(measured))
            return result

        setattr(runner, sglang_parts.REPLAY, replay_and_measure)

    scheduler.Scheduler.canary_measure = measure
    scheduler.run_scheduler_process(*args, **kwargs)


def _measure(runner: Any, forward_batch: Any, job: dict[str, Any]) -> dict[str, Any]:
    from sglang_kv_canary.wiring.context import context

    kept, sizes = Captured.of(runner), runner.capture_bs
    rows = [manager.state.row_memory.words.clone() for manager in context.managers]
    runner.capture_bs = [next(b for b in runner.capture_bs if b >= forward_batch.batch_size)]
    rng, profiles = random.Random(0), {}
    times: dict[str, list[float]] = {variant: [] for variant in job["variants"]}
    for round_number in range(job["captures"]):
        order = rng.sample(job["variants"], len(job["variants"]))
        graphs = {variant: _capture(runner, variant) for variant in order}
        sglang_parts.load_inputs(runner, forward_batch)
        for variant, micros in _time_each(graphs, job["replays"]).items():
            times[variant].append(micros)
        if job["profile"] and round_number == 0:
            profiles = {variant: _profile(graphs[variant]) for variant in order}
    kept.put_back(runner)
    runner.capture_bs = sizes
    for manager, words in zip(context.managers, rows, strict=True):
        # The device counted forwards that the host did not see.
        manager.forward_ct = int(manager.state.summary[0])
        manager.state.row_memory.words.copy_(words)
    return {"times": times, "profiles": profiles}


def _capture(runner: Any, variant: str) -> Any:
    runner.buffers.out_cache_loc.zero_()  # a capture runs the model on what lies there
    contexts = {
        "off": lambda: _without_canary(runner),
        "off+fork": lambda: _without_canary(runner, fork=True),
        "on": nullcontext,
        "on+mark": _marked,
        "on-all": lambda: _branches("HEAD_AND_CHECK"),
        "on-end-in-line": lambda: _branches("HEAD_AND_CHECK", beside_lm_head=False),
        "on-in-line": lambda: _branches("NOTHING", beside_lm_head=False),
    }
    _word()  # not of the capture's memory
    with contexts[variant]():
        sglang_parts.capture_anew(runner)
    captured = Captured.of(runner)
    (graph,) = captured.graphs.values()
    return graph, captured.outputs


@contextmanager
def _branches(beside_layers: str, beside_lm_head: bool = True) -> Iterator[None]:
    """Where the canary's captures have a second branch."""
    from sglang_kv_canary.single_forward_manager import BesideLayers
    from sglang_kv_canary.wiring.context import context

    singles = [single for m in context.managers for single in m._single_forwards.values()]
    beside = BesideLayers[beside_layers]
    before = [single._beside_layers for single in singles]
    for single in singles:
        single._beside_layers = beside
        if not beside_lm_head:
            single.layers_have_run = lambda: None
    try:
        yield
    finally:
        for single, kept in zip(singles, before, strict=True):
            single._beside_layers = kept
            single.__dict__.pop("layers_have_run", None)


@contextmanager
def _marked() -> Iterator[None]:
    """Each branch beside the layers begins after a fill."""
    from sglang_kv_canary.wiring.context import context

    singles = [single for m in context.managers for single in m._single_forwards.values()]
    for single in singles:
        single._branch.point = functools.partial(_point_after_fill, single)
    try:
        yield
    finally:
        for single in singles:
            del single._branch.point


@functools.cache
def _word() -> Any:
    """Graphs fill it as long as they are replayed, so it is never given back."""
    import torch

    return torch.zeros(1, device="cuda")


def _point_after_fill(single: Any) -> Any:
    if single._beginning is None:  # else it is the end of the layers
        _word().zero_()
    return type(single._branch).point(single._branch)


@contextmanager
def _without_canary(runner: Any, fork: bool = False) -> Iterator[None]:
    from sglang_kv_canary.wiring.context import context

    model = runner.model_runner.model
    bracketed, by_runner = model.forward, context.by_runner
    original = innermost(bracketed)
    model.forward = _with_empty_branch(original) if fork else original
    context.by_runner = {}
    try:
        yield
    finally:
        model.forward, context.by_runner = bracketed, by_runner


def _with_empty_branch(forward: Callable[..., Any]) -> Callable[..., Any]:
    from sglang_kv_canary.single_forward_manager.graph_branch import GraphBranch

    branch, nothing = GraphBranch(), _word()

    @functools.wraps(forward)
    def forked(*args: Any, **kwargs: Any) -> Any:
        beginning = branch.point()
        result = forward(*args, **kwargs)
        with branch.after(beginning):
            nothing.zero_()
        branch.join()
        return result

    return forked


def _time_each(graphs: dict[str, Any], replays: int) -> dict[str, float]:
    """Microseconds per replay: median of rounds, in each of which every graph runs."""
    import torch

    rounds: dict[str, list[float]] = {variant: [] for variant in graphs}
    for _ in range(ROUNDS):
        for variant, (graph, _) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            _forget_rows()
            graph.replay()
            start.record()
            for _ in range(replays):
                _forget_rows()
                graph.replay()
            end.record()
            end.synchronize()
            rounds[variant].append(1000 * start.elapsed_time(end) / replays)
    return {variant: statistics.median(values) for variant, values in rounds.items()}


def _forget_rows() -> None:
    """One step is replayed again and again; in every variant, so that it costs them the same."""
    from sglang_kv_canary.wiring.context import context

    for manager in context.managers:
        manager.state.row_memory.forget()


def _profile(captured: Any) -> dict[str, Any]:
    """Of one replay, in microseconds: from first to last kernel, kernels' sum, time in which none ran; see above."""
    import torch

    from sglang_kv_canary.wiring.context import context

    graph, _ = captured
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            _forget_rows()
            graph.replay()
        torch.cuda.synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    # The last one: the first ones wait for the host. It begins with a fill that forgets rows.
    spans = spans[-len(spans) // PROFILED + len(context.managers) :]
    begin = until = spans[0][0]
    busy = 0.0
    for start, end, _ in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    span = until - begin
    total = sum(end - start for start, end, _ in spans)
    others = [(start, end) for start, end, name in spans if name not in OWN_KERNELS]
    own = [
        f"{name} {start - begin:.1f} to {end - begin:.1f}"
        for start, end, name in spans
        if name in OWN_KERNELS
    ]
    return {
        "kernels": len(spans),
        "span": span,
        "sum": total,
        "idle": span - busy,
        "before others": others[0][0] - begin,
        "after others": until - max(end for _, end in others),
        "own": own,
    }


# In the main process


def _run(engine: Any, case: str, job: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    batch, length = map(int, case.split("x"))
    engine.flush_cache()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        engine.collective_rpc("canary_measure", answer=str(answer), **job)
        ids = [[rng.randrange(10, 500) for _ in range(length)] for _ in range(batch)]
        params = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        engine.generate(input_ids=ids, sampling_params=params)
        return json.loads(answer.read_text())


def _print(content: str, case: str, result: dict[str, Any]) -> None:
    off = statistics.median(result["times"]["off"])
    for variant, times in result["times"].items():
        median = statistics.median(times)
        against = f"{median - off:+8.1f} us {100 * (median / off - 1):+7.3f} %"
        spread = f"{min(times):10.1f} .. {max(times):.1f}"
        print(f"{content:8}{case:9}{variant:16}{median:10.1f} us{against}{spread}", flush=True)
        if profile := result["profiles"].get(variant):
            sums = {name: value for name, value in profile.items() if name != "own"}
            print("    " + ", ".join(f"{name} {value:.1f}" for name, value in sums.items()))
            print("    " + "; ".join(profile["own"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--content", default="none,partial,all")
    parser.add_argument("--cases", nargs="*", default=["1x512", "64x256", "128x512"])
    parser.add_argument("--engine", default="{}", help="further Engine arguments, JSON")
    parser.add_argument("--captures", type=int, default=6)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--out")
    options = parser.parse_args()
    job = {name: getattr(options, name) for name in ("captures", "replays", "profile", "variants")}
    for content in options.content.split(","):
        args = {**ENGINE_ARGS, "kv_canary_real_data": content, **json.loads(options.engine)}
        engine = switchable_engine(run_measuring_scheduler, options.model, args)
        rng = random.Random(0)
        for case in options.cases:
            result = _run(engine, case, job, rng)
            _print(content, case, result)
            if options.out:
                line = {"pid": os.getpid(), "content": content, "case": case, **result}
                with open(options.out, "a") as file:
                    file.write(json.dumps(line) + "\n")
        engine.shutdown()


if __name__ == "__main__":
    main()
