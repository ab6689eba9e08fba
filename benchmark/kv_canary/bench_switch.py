"""Cost of the canary with everything else equal: one server, in which it is taken out and put back between runs.

    python benchmark/kv_canary/bench_switch.py MODEL_DIR [--content none,partial,all] [--cases 1x512x512 ...]
        [--engine '{"disable_piecewise_cuda_graph": true}'] [--reps 5] [--out results.jsonl]

Two servers that differ in nothing differ by up to 1 % in run time (where their memory lies), which is more than the
canary costs. Here `off`, each content mode and `off2` are states of one scheduler process: same weights, same pool,
same buffers; decode graphs are captured once for each state. While it is off, methods and `model.forward` are SGLang's
own, as in a server without `--kv-canary`. `off2` is `off` with graphs captured again: how far it is from `off` is the
noise. Per repetition every state runs once, in rotating order, on the same prompts. A case is BATCHxINPUTxOUTPUT
tokens. Prints one JSON line per case and, last, a table of the cost in per cent and microseconds a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import sglang_parts
from sglang_parts import Captured

OFF = ("off", "off2")
CONTENTS = ("none", "partial", "all")  # each needs what the one before it needs, and more
DEFAULT_CASES = ("1x512x512", "64x256x512", "128x512x512", "16x16384x1")


# In the scheduler process


# Of the hooks' context: without them a hook that is still there returns at its first lines.
_PARTS = (
    "managers",
    "by_runner",
    "allocator_kinds",
    "history",
    "host_tier",
    "host_slots_of",
    "states",
)


class CanarySwitch:
    """Takes the canary out of a scheduler process and puts it back. The server must be idle, its pools empty.

    While it is out, nobody notes which slots and host pages change hands. So no record may outlive a switch. Flush the
    cache before: it empties the device pool and HiCache's host pool. A storage backend keeps its pages, so use none.
    """

    def __init__(self, scheduler: Any) -> None:
        from sglang_kv_canary.wiring.context import context

        self._context = context
        self._installed = {name: getattr(context, name) for name in _PARTS}
        self._worker = scheduler.tp_worker
        target = self._worker.model_runner
        self._runners, graph_runners = [target], [sglang_parts.decode_runner(target)]
        if (worker := getattr(scheduler, "draft_worker", None)) is not None:
            draft = worker.draft_worker  # spec v2
            self._runners.append(draft.draft_runner)
            graph_runners += [draft.cuda_graph_runner, draft.cuda_graph_runner_for_draft_extend]
        self._graph_runners = [runner for runner in graph_runners if runner is not None]
        self._forwards = [runner.model.forward for runner in self._runners]
        self._wrapped = wrapped_methods(scheduler) if self._installed["states"] else []
        self._captured = {self._installed["managers"][0].config.content_mode.value: self._graphs()}

    def to(self, state: str) -> None:
        """`off`, `off2` or a content mode. With HiCache it must be the server's own."""
        self.settle()
        if state not in OFF:
            self._use_content_mode(state)
        self._install(state not in OFF)
        if state not in self._captured:
            for runner in self._graph_runners:
                # A capture must not wait for the last load from host memory, as its forward did.
                self._worker.set_hicache_consumer(-1)
                sglang_parts.capture_anew(runner)
            self._captured[state] = self._graphs()
        for runner, captured in zip(self._graph_runners, self._captured[state], strict=True):
            captured.put_back(runner)
        _synchronize()

    def settle(self) -> None:
        """Nothing is left behind: slots that were given back are marked, and what was found is reported."""
        _synchronize()
        for manager in list(self._context.managers):
            manager.on_idle()
        tier = self._installed["host_tier"]
        if tier is not None and tier.records.part(0, tier.records.num_slots).present.any():
            raise RuntimeError("expected an empty host pool at a switch: flush the cache before")

    def work(self) -> dict[str, int]:
        """What the canary has done since the server's start, in or out. Equal numbers: nothing in between."""
        managers, tier = self._installed["managers"], self._installed["host_tier"]
        done = {
            "steps": sum(manager.step_ct for manager in managers),
            "forwards": sum(manager.forward_ct for manager in managers),
            "host_ns": sum(manager.clock.spent_ns for manager in managers),
            "checked": sum(_checked(manager) for manager in managers),
            "violations": sum(manager.violations.reported for manager in managers),
            "internal_errors": sum(manager.errors.total for manager in managers),
        }
        names = ("written_back", "loaded", "refused")
        return {**done, **({} if tier is None else {name: getattr(tier, name) for name in names})}

    def _use_content_mode(self, content: str) -> None:
        tier = self._installed["host_tier"]
        if tier is not None and tier.mode.value != content:
            raise ValueError(f"expected {tier.mode.value}, as the host pool has it, got {content}")
        for manager in self._installed["managers"]:
            use_content_mode(manager, content)

    def _graphs(self) -> list[Captured]:
        return [Captured.of(runner) for runner in self._graph_runners]

    def _install(self, on: bool) -> None:
        from sglang_kv_canary.wiring.startup_check import verify_hooks_applied

        if not on:
            _take_hooks_out()
        elif self._context.registration.hooks is not None:
            verify_hooks_applied()  # puts them back
        absent = type(self._context)()
        for name, value in self._installed.items():
            setattr(self._context, name, value if on else getattr(absent, name))
        for owner, name, method in self._wrapped:
            vars(owner).pop(name, None)
            if on:
                setattr(owner, name, method)
        for runner, bracketed in zip(self._runners, self._forwards, strict=True):
            runner.model.forward = bracketed if on else innermost(bracketed)
            if on:
                sglang_parts.take_up_pool(runner.token_to_kv_pool)


def wrapped_methods(scheduler: Any) -> list[tuple[Any, str, Any]]:
    """(object, name, method) of what the watch of states has wrapped on SGLang's objects."""
    rows, tree = scheduler.req_to_token_pool, scheduler.tree_cache
    names = "mamba_pool", "mamba_allocator"
    owners = [rows, tree, *[getattr(rows, name) for name in names if hasattr(rows, name)]]
    return [
        (owner, name, method)
        for owner in owners
        for name, method in vars(owner).items()
        if callable(method) and _is_ours(method)
    ]


def _is_ours(method: Any) -> bool:
    method = getattr(method, "func", method)  # of functools.partial
    code = getattr(method, "__code__", None)
    return code is not None and "kv_canary" in code.co_filename


def _take_hooks_out() -> None:
    try:
        from sglang_kv_canary.wiring.unused_hooks import take_hooks_out
    except ImportError:  # an older version, for `bench_turns.py --base`: hooks stay
        return
    take_hooks_out()


def _checked(manager: Any) -> int:
    """Slots, by the device. Waits."""
    from sglang_kv_canary.state import TagCounter

    return int(manager.state.counters[:, TagCounter.CHECKED].sum())


def use_content_mode(manager: Any, content: str) -> None:
    from sglang_kv_canary.config import ContentMode

    launcher = dataclasses.replace(manager.launcher, content_mode=ContentMode(content))
    manager.launcher = launcher
    for single in manager._single_forwards.values():
        single._launcher = launcher


def innermost(forward: Any) -> Any:
    """SGLang's own `model.forward`, which the canary's brackets wrap."""
    while "kv_canary" in forward.__code__.co_filename:
        forward = forward.__wrapped__
    return forward


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_switchable_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process with one more remote call, `canary_to(state)`."""
    from sglang.srt.managers import scheduler

    def canary_to(self: Any, state: str) -> None:
        if not hasattr(self, "_canary_switch"):
            self._canary_switch = CanarySwitch(self)
        self._canary_switch.to(state)

    scheduler.Scheduler.canary_to = canary_to
    scheduler.run_scheduler_process(*args, **kwargs)


# In the main process


ENGINE_ARGS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "max_total_tokens": 300_000,
    "cuda_graph_max_bs": 128,
    "log_level": "error",
    "random_seed": 1,
    "kv_canary": "log",
}


def switchable_engine(run_scheduler: Callable[..., None], model: str, args: dict[str, Any]) -> Any:
    """`sglang.Engine` whose scheduler processes run `run_scheduler`, a function of the main module."""
    from sglang.srt.entrypoints.engine import Engine

    engine_class = type(
        "SwitchableEngine", (Engine,), {"run_scheduler_process_func": staticmethod(run_scheduler)}
    )
    return engine_class(model_path=model, **sglang_parts.engine_arguments(args))


def _run(engine: Any, ids: list[list[int]], output_len: int) -> float:
    """Seconds."""
    params = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}
    start = time.perf_counter()
    results = engine.generate(input_ids=ids, sampling_params=params)
    seconds = time.perf_counter() - start
    lengths = {len(result["output_ids"]) for result in results}
    if lengths != {output_len}:
        raise RuntimeError(f"expected {output_len} tokens from every request, got {lengths}")
    return seconds


def _empty(engine: Any) -> None:
    """The server is idle and its pool empty at every switch."""
    for _ in range(100):
        if engine.flush_cache().success:
            return
        time.sleep(0.05)
    raise RuntimeError("the server did not become idle")


def _run_case(
    engine: Any, case: str, states: tuple[str, ...], reps: int, rng: random.Random
) -> dict[str, list[float]]:
    batch, input_len, output_len = map(int, case.split("x"))
    seconds: dict[str, list[float]] = {state: [] for state in states}
    for rep in range(reps + 1):
        ids = [[rng.randrange(10, 500) for _ in range(input_len)] for _ in range(batch)]
        turn = rep % len(states)
        for state in states[turn:] + states[:turn]:
            _empty(engine)
            engine.collective_rpc("canary_to", state=state)
            took = _run(engine, ids, output_len)
            _empty(engine)
            if rep:  # the first run compiles and warms up
                seconds[state].append(took)
    return seconds


def _cost(seconds: dict[str, list[float]], state: str) -> tuple[float, float]:
    """(median, standard error) of the pairwise ratios to `off`, minus 1, in per cent."""
    ratios = [100 * (b / a - 1) for a, b in zip(seconds["off"], seconds[state], strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return statistics.median(ratios), error


def _line(case: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    off, steps = statistics.median(seconds["off"]), int(case.split("x")[2])
    line: dict[str, Any] = {"case": case, "off_s": round(off, 4), "states": {}}
    for state in seconds:
        if state != "off":
            percent, error = _cost(seconds, state)
            line["states"][state] = {
                "percent": round(percent, 3),
                "error": round(error, 3),
                "us_a_step": round(percent / 100 * off / steps * 1e6, 1),
            }
    line["seconds"] = {state: [round(s, 5) for s in values] for state, values in seconds.items()}
    return line


def _table(lines: list[dict[str, Any]]) -> None:
    print(f"{'case':<14}{'off s':>9}  {'state':<9}{'cost':>18}{'a step':>13}")
    for line in lines:
        for state, cost in line["states"].items():
            print(
                f"{line['case']:<14}{line['off_s']:>9.4f}  {state:<9}"
                f"{cost['percent']:>+8.2f} +- {cost['error']:.2f} %{cost['us_a_step']:>10.1f} us"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--content", default=",".join(CONTENTS))
    parser.add_argument("--cases", nargs="*", default=list(DEFAULT_CASES))
    parser.add_argument("--engine", default="{}", help="further Engine arguments, JSON")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--out")
    options = parser.parse_args()
    chosen = options.content.split(",")
    if unknown := sorted(set(chosen) - set(CONTENTS)):
        parser.error(f"--content: {', '.join(unknown)} is none of {', '.join(CONTENTS)}")
    contents = [content for content in CONTENTS if content in chosen]
    args = {**ENGINE_ARGS, "kv_canary_real_data": contents[-1], **json.loads(options.engine)}
    start = time.perf_counter()
    engine = switchable_engine(run_switchable_scheduler, options.model, args)
    print(json.dumps({"startup_s": round(time.perf_counter() - start, 1)}), flush=True)
    rng, lines = random.Random(0), []
    for case in options.cases:
        states = (OFF[0], *contents, OFF[1])
        lines.append(_line(case, _run_case(engine, case, states, options.reps, rng)))
        print(json.dumps(lines[-1]), flush=True)
        if options.out:
            with open(options.out, "a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    engine.shutdown()
    _table(lines)


if __name__ == "__main__":
    main()
