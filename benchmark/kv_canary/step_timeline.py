"""Where a step's time goes: on the host from mark to mark, on the GPU in the layers and between them.

The GPU's times are those of CUDA events before and after the layers, on the forward stream. Of an eager or piecewise
prefill the canary's own work right before and after the layers is not a part of them. A decode graph holds both.
With EAGLE's overlap worker each graph of a step has marks and events of its own.
"""

from __future__ import annotations

import collections
import functools
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sglang_parts

from sglang_kv_canary.runner.brackets import ModelForward

_SCHEDULER = ("get_next_batch_to_run", "run_batch")
_RUNNER = ("forward", "_forward_raw")


@dataclass(slots=True)
class _Step:
    """One batch that was launched."""

    extends: bool
    us: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    away: float = 0.0  # seconds that the other server has had so far
    begin: Any = None  # CUDA events around the layers
    end: Any = None
    graphs: list[_Graph] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Graph:
    name: str
    begin: Any  # CUDA events around its launch
    end: Any


@dataclass(slots=True)
class StepTimeline:
    """`now`, `away`, `waited`: seconds so far, on this server's clock, of the other server's turns, for the GPU."""

    now: Callable[[], float]
    away: Callable[[], float]
    waited: Callable[[], float]
    _steps: list[_Step] = field(default_factory=list)
    _last: float = 0.0
    _last_waited: float = 0.0
    _us: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    _enter: Callable[..., None] = ModelForward.__enter__
    _exit: Callable[..., None] = ModelForward.__exit__

    def mark(self, part: str) -> None:
        """`part` has ended. Waits for the GPU are a part of their own."""
        now, waited = self.now(), self.waited()
        wait = waited - self._last_waited
        self._us["waits for the GPU"] += 1e6 * wait
        self._us[part] += 1e6 * (now - self._last - wait)
        self._last, self._last_waited = now, waited

    def follow(self, scheduler: Any) -> None:
        """Until `leave`."""
        runner = scheduler.tp_worker.model_runner

        def schedule(*args: Any, **kwargs: Any) -> Any:
            self.mark("receive, and end the step")
            found = type(scheduler).get_next_batch_to_run(scheduler, *args, **kwargs)
            self.mark("choose a batch")
            return found

        def run(batch: Any, *args: Any) -> Any:
            self._steps.append(_Step(batch.forward_mode.is_extend(), away=self.away()))
            found = type(scheduler).run_batch(scheduler, batch, *args)
            self.mark("sample, and end the launch")
            self._steps[-1].us, self._us = self._us, collections.defaultdict(float)
            return found

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.mark("begin the launch")
            found = type(runner).forward(runner, *args, **kwargs)
            self.mark("after the layers")
            return found

        def layers(*args: Any, **kwargs: Any) -> Any:
            self.mark("before the layers")
            step = self._steps[-1]
            step.begin, step.end = _recorded(), None
            found = type(runner)._forward_raw(runner, *args, **kwargs)
            step.end = step.end or _recorded()
            self.mark("layers")
            return found

        def before_layers(bracket: ModelForward) -> None:
            self.mark("layers")
            self._enter(bracket)
            self.mark("the canary's right before the layers")
            if self._steps:
                self._steps[-1].begin = _recorded()

        def after_layers(bracket: ModelForward, *error: Any) -> None:
            if self._steps:
                self._steps[-1].end = _recorded()
            self.mark("layers")
            self._exit(bracket, *error)
            self.mark("the canary's right after the layers")

        ModelForward.__enter__, ModelForward.__exit__ = before_layers, after_layers
        scheduler.get_next_batch_to_run, scheduler.run_batch = schedule, run
        runner.forward, runner._forward_raw = forward, layers
        for name, graph in _speculative_graphs(scheduler):
            setattr(graph, sglang_parts.REPLAY, functools.partial(self._replay, name, graph))

    def _replay(self, name: str, graph: Any, *args: Any, **kwargs: Any) -> Any:
        self.mark(f"before the {name} graph")
        begin = _recorded()
        found = getattr(type(graph), sglang_parts.REPLAY)(graph, *args, **kwargs)
        self._steps[-1].graphs.append(_Graph(name, begin, _recorded()))
        self.mark(f"launch the {name} graph")
        return found

    def leave(self, scheduler: Any) -> None:
        ModelForward.__enter__, ModelForward.__exit__ = self._enter, self._exit
        for name in _SCHEDULER:
            delattr(scheduler, name)
        for name in _RUNNER:
            delattr(scheduler.tp_worker.model_runner, name)
        for _, graph in _speculative_graphs(scheduler):
            delattr(graph, sglang_parts.REPLAY)

    def figures(self, first: int, last: int) -> dict[str, dict[str, float]]:
        """Of the batches `first` to `last`, by what was launched before and what was launched: means in us."""
        kinds: dict[str, list[dict[str, float]]] = {}
        for before, step in itertools.pairwise(self._steps[first : last + 1]):
            if before.away == step.away:
                names = ["prefill" if each.extends else "decode" for each in (step, before)]
                kinds.setdefault(" after ".join(names), []).append(
                    {**step.us, **_gpu(before, step)}
                )
        return {kind: _means(steps) for kind, steps in kinds.items()}


def _speculative_graphs(scheduler: Any) -> list[tuple[str, Any]]:
    """In the order of a step. Empty but for EAGLE's overlap worker."""
    draft = getattr(getattr(scheduler, "draft_worker", None), "draft_worker", None)
    found = {
        "draft": getattr(draft, "cuda_graph_runner", None),
        "verify": draft and sglang_parts.decode_runner(scheduler.tp_worker.model_runner),
        "draft extend": getattr(draft, "cuda_graph_runner_for_draft_extend", None),
    }
    return [(name, graph) for name, graph in found.items() if graph is not None]


def _gpu_of_graphs(before: _Step, step: _Step) -> dict[str, float]:
    """us in each graph, and between it and the one before."""
    if step.graphs:
        step.graphs[-1].end.synchronize()
    found = {}
    for last, graph in itertools.pairwise([*before.graphs[-1:], *step.graphs]):
        found[f"GPU before the {graph.name} graph"] = 1e3 * last.end.elapsed_time(graph.begin)
        found[f"GPU in the {graph.name} graph"] = 1e3 * graph.begin.elapsed_time(graph.end)
    return found


def _gpu(before: _Step, step: _Step) -> dict[str, float]:
    """us. Nothing on a CPU."""
    if before.end is None or step.end is None:
        return {}
    step.end.synchronize()
    return _gpu_of_graphs(before, step) | {
        "GPU between the layers": 1e3 * before.end.elapsed_time(step.begin),
        "GPU in the layers": 1e3 * step.begin.elapsed_time(step.end),
    }


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    parts = dict.fromkeys(part for step in steps for part in step)
    means = {
        part: round(statistics.mean(step.get(part, 0.0) for step in steps), 1) for part in parts
    }
    return {"steps": len(steps), **means}


def _recorded() -> Any:
    import torch

    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
