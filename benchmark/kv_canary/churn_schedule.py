"""Requests that a scheduler begins by its own steps, so that two runs of them have the same batches, step by step.

Clients outside of the scheduler begin the next request when the last answer arrives. When that is depends on the time
that each process takes, and two runs with equal prompts then have other batches: they differ by several per cent. Here
the scheduler itself begins a request for each one that ends. Nothing that it decides depends on time.
"""

from __future__ import annotations

import hashlib
import itertools
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sglang_parts
from step_timeline import StepTimeline
from turns import Turns


class Waits:
    """How long the scheduler's thread has waited for results of the GPU, in seconds, since `count`."""

    seconds = 0.0

    @classmethod
    def count(cls) -> None:
        import torch

        wait = torch.cuda.Event.synchronize

        def synchronize(event: Any) -> None:
            began = time.perf_counter()
            wait(event)
            cls.seconds += time.perf_counter() - began

        torch.cuda.Event.synchronize = synchronize


@dataclass(slots=True)
class _Step:
    """One result."""

    at: float  # seconds
    waited: float  # seconds, see `Waits`
    faults: int  # page faults of this thread since its start
    extends: bool
    names: list[str]  # of the requests that got a token
    chunks: list[str]  # of those of which a part was computed
    released: int  # requests begun so far
    ended: int


@dataclass(slots=True)
class Schedule:
    """Keeps `clients` requests of `total` running or waiting. When none is left to begin, it cuts the others short.

    The window of the figures begins when as many requests have ended as run at once, and ends with the last beginning.
    """

    total: int
    clients: int
    turns: Turns | None = None  # with another server
    timeline: StepTimeline | None = None
    _held: dict[str, Any] = field(default_factory=dict)  # by name, until all have arrived
    _queue: Iterator[Any] | None = None
    _begun: dict[str, float] = field(default_factory=dict)
    _limits: list[Any] = field(
        default_factory=list
    )  # sampling parameters, whose lengths can be cut
    _ended: int = 0
    _steps: list[_Step] = field(default_factory=list)

    def admit(self, received: list[Any]) -> list[Any]:
        """What the scheduler takes in now, of what it has received and of what is held."""
        passed = []
        for item in received:
            if not hasattr(item, "sampling_params"):
                passed.append(item)
            elif item.rid in self._held:
                raise RuntimeError(f"expected requests of different names, got {item.rid} twice")
            else:
                self._held[item.rid] = item
        if self._queue is None and len(self._held) == self.total:
            self._queue = iter(sorted(self._held.values(), key=lambda item: item.rid))
            if self.turns is not None:
                self.turns.meet()
        if self._queue is None:
            return passed
        now = self._now()
        while len(self._begun) < self.total and len(self._begun) - self._ended < self.clients:
            item = next(self._queue)
            self._begun[item.rid] = now
            self._limits.append(item.sampling_params)
            passed.append(item)
        if len(self._begun) == self.total:
            for limit in self._limits:
                limit.max_new_tokens = 1
            self._limits.clear()
        return passed

    def around_result(self, batch: Any, process: Callable[[], None]) -> None:
        """`process` handles the result of `batch`."""
        running = [
            req for req in batch.reqs if req.finished_reason is None and not req.is_retracted
        ]
        gets = [req for req in running if sglang_parts.chunks_under_way(req) <= 0]
        chunks = [req.rid for req in running if sglang_parts.chunks_under_way(req) > 0]
        if self.timeline is not None:
            self.timeline.mark("between launch and results")
        process()
        if self.timeline is not None:
            self.timeline.mark("handle results")
        self._ended += sum(req.finished_reason is not None for req in gets)
        names = [req.rid for req in gets]
        extends = batch.forward_mode.is_extend()
        step = _Step(
            self._now(),
            Waits.seconds,
            resource.getrusage(resource.RUSAGE_THREAD).ru_minflt,
            extends,
            names,
            chunks,
            len(self._begun),
            self._ended,
        )
        self._steps.append(step)
        if self.turns is not None:
            (self.turns.leave if len(self._begun) == self.total else self.turns.after_step)()

    def follow_launches(self, scheduler: Any) -> None:
        """Until `figures` are asked for and the timeline leaves."""

        def away() -> float:
            return 0.0 if self.turns is None else self.turns.away

        self.timeline = StepTimeline(self._now, away, lambda: Waits.seconds)
        self.timeline.follow(scheduler)

    def _now(self) -> float:
        """Seconds."""
        return time.perf_counter() if self.turns is None else self.turns.now()

    def figures(self) -> dict[str, Any]:
        """Of the window, and `batches`: equal for two runs with the same batches."""
        window = [
            index
            for index, step in enumerate(self._steps)
            if step.ended >= self.clients and step.released < self.total
        ]
        if len(window) < 100:
            raise RuntimeError(
                f"expected 100 steps between ramp and drain, got {len(window)}; raise --requests"
            )
        first, last = window[0], window[-1]
        steps = self._steps[first + 1 : last + 1]
        took = steps[-1].at - self._steps[first].at
        kept = self._steps[first : last + 1]
        lengths = [round(b.at - a.at, 6) for a, b in itertools.pairwise(kept)]
        waits = [round(b.waited - a.waited, 6) for a, b in itertools.pairwise(kept)]
        faults = [b.faults - a.faults for a, b in itertools.pairwise(kept)]
        ttft, itl = self._latencies(first, last)
        return {
            "seconds": round(took, 5),
            "window_steps": len(steps),
            "tokens_per_s": round(sum(len(step.names) for step in steps) / took, 2),
            "step_p50": round(statistics.median(lengths), 6),
            **_summary_of("ttft", ttft),
            **_summary_of("itl", itl),
            "batches": self._digest(last),
            "first_step": first + 1,
            "step_lengths": lengths,
            "step_waits": waits,
            "step_extends": [step.extends for step in steps],
            "token_steps": self._tokens_of(first, last),
            **_means_by_kind(steps, lengths, waits, faults),
            **({} if self.timeline is None else {"timeline": self.timeline.figures(first, last)}),
        }

    def _latencies(self, first: int, last: int) -> tuple[list[float], list[float]]:
        """(times to first token, times between tokens) of tokens in the window, in seconds."""
        before: dict[str, float] = {}
        ttft, itl = [], []
        for index, step in enumerate(self._steps[: last + 1]):
            for name in step.names:
                if index > first:
                    values = itl if name in before else ttft
                    values.append(step.at - before.get(name, self._begun[name]))
                before[name] = step.at
        return ttft, itl

    def _tokens_of(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Of `same_tokens.py`, counted from `first` on. Without those whose token before came earlier."""
        before: dict[str, int] = {}
        tokens: Counter[tuple[int, int]] = Counter()
        for index, step in enumerate(self._steps[first : last + 1]):
            tokens.update((index, before[name]) for name in step.names if name in before)
            before.update(dict.fromkeys(step.names, index))
        return [(*steps, count) for steps, count in tokens.items()]

    def _digest(self, last: int) -> str:
        digest = hashlib.sha256()
        for step in self._steps[: last + 1]:
            digest.update(f"{step.extends}{step.names}{step.chunks}{step.released}".encode())
        return digest.hexdigest()[:12]


def _means_by_kind(
    steps: list[_Step], lengths: list[float], waits: list[float], faults: list[int]
) -> dict[str, dict[str, float]]:
    """By kind of a step, and of the next one, which is launched in it: us from result to result, us waited, faults."""
    kinds: dict[str, list[int]] = {}
    for i, (step, launched) in enumerate(itertools.pairwise(steps)):
        names = ["prefill" if each.extends else "decode" for each in (step, launched)]
        kinds.setdefault(" launching ".join(names), []).append(i)
    return {
        kind: {
            "steps": len(of_kind),
            "us": round(1e6 * statistics.mean(lengths[i] for i in of_kind)),
            "waited_us": round(1e6 * statistics.mean(waits[i] for i in of_kind)),
            "faults": round(statistics.mean(faults[i] for i in of_kind), 1),
        }
        for kind, of_kind in kinds.items()
    }


def follow(scheduler: Any, schedule: Schedule) -> Schedule:
    """Until `leave`. The classes' methods may be hooked by the canary."""
    process = scheduler.process_batch_result

    def process_batch_result(batch: Any, result: Any) -> None:
        schedule.around_result(batch, lambda: process(batch, result))

    sglang_parts.receive_through(scheduler, schedule.admit)
    scheduler.process_batch_result = process_batch_result
    return schedule


def leave(scheduler: Any) -> None:
    """Undo `follow`."""
    sglang_parts.receive_as_before(scheduler)
    del scheduler.process_batch_result


def _summary_of(name: str, values: list[float]) -> dict[str, float]:
    """Median, 90th percentile and mean. Nothing of fewer than two values: answers may have one token."""
    if len(values) < 2:
        return {}
    p90 = statistics.quantiles(values, n=10)[8]
    found = {"p50": statistics.median(values), "p90": p90, "mean": statistics.mean(values)}
    return {f"{name}_{of}": round(value, 6) for of, value in found.items()}
