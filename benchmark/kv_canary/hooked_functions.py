"""SGLang's functions of a decode step, with the canary's hooks around them. What the functions do is not timed."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch

from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_kv_canary import wiring
from sglang_kv_canary.host_code import HOST
from sglang_kv_canary.wiring.direct_hooks import call_directly
from sglang_kv_canary.wiring.releases import release


@dataclass
class Clock:
    """CPU and wall time of the timed parts of a step, by entry."""

    cold_mib: float
    running: bool = False  # parts are timed
    cpu: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # ns of this step
    wall: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _entry: str | None = None
    _began: tuple[int, int] = (0, 0)

    _empty: int = 0  # ns that a part without anything in it takes

    def __post_init__(self) -> None:
        self._memory = np.zeros(int(self.cold_mib * 2**17))
        self.running = True
        for i in range(200):
            self.start(str(i))
            self.stop()
        self.running = False
        self._empty = int(statistics.median(self.take()[0].values()))

    def cool(self) -> None:
        """Evict the caches."""
        if self.running:
            self._memory.fill(time.perf_counter())

    def start(self, entry: str) -> None:
        if self.running:
            self._entry = entry
            self._began = time.perf_counter_ns(), time.thread_time_ns()

    def stop(self) -> None:
        if self._entry is not None:
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            entry, self._entry = self._entry, None
            self.wall[entry] += max(0, wall - self._began[0] - self._empty)
            self.cpu[entry] += max(0, cpu - self._began[1] - self._empty)

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """(CPU, wall) of the step that ends."""
        taken = dict(self.cpu), dict(self.wall)
        self.cpu.clear()
        self.wall.clear()
        return taken


@dataclass
class Hooked:
    """The scheduler, its model runner and its graph runner in one."""

    clock: Clock
    inside: dict[str, Callable[[], Any]] = field(default_factory=dict)  # what functions do

    @property
    def model_runner(self) -> Hooked:
        return self

    def _do(self, name: str, entry_after: str | None) -> Any:
        self.clock.stop()
        returned = self.inside[name]()
        if entry_after is not None:
            self.clock.cool()
            self.clock.start(entry_after)
        return returned

    def run_batch(self, batch: Any) -> Any:
        return self._do("run_batch", "run_batch, after")

    def forward(self, forward_batch: Any) -> Any:
        return self._do("forward", "forward, after")

    def replay(self, forward_batch: Any) -> Any:
        return self._do("replay", None)

    def sample(self, logits: Any, forward_batch: Any) -> Any:
        return self._do("sample", "sample")

    def process_batch_result(self, batch: Any, result: Any) -> Any:
        return self._do("process_batch_result", "result, after")


@dataclass(eq=False)
class HookedAllocator:
    """A slot allocator whose calls are hooked and timed."""

    real: Any
    clock: Clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def alloc(self, need_size: int) -> Any:
        slots = self.real.alloc(need_size)
        self.clock.start("alloc")
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        self.clock.stop()
        self.real.free(free_index)


class TimedAllocator:
    """What SGLang's code calls."""

    def __init__(self, hooked: HookedAllocator) -> None:
        self._hooked, self._clock = hooked, hooked.clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooked, name)

    def alloc(self, need_size: int) -> torch.Tensor:
        slots = self._hooked.alloc(need_size)
        self._clock.stop()
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        self._clock.start("free" if free_index.numel() else "free of nothing")
        self._hooked.free(free_index)


@dataclass
class HookedRows:
    """ReqToTokenPool, whose rows are given back."""

    real: Any
    clock: Clock

    def free(self, req: Any) -> None:
        self.clock.stop()
        self.real.free(req)


_HOOKED = {
    "Scheduler.run_batch": (Hooked, "run_batch"),
    "Scheduler.process_batch_result": (Hooked, "process_batch_result"),
    "ModelRunner.forward": (Hooked, "forward"),
    "ModelRunner.sample": (Hooked, "sample"),
    "CudaGraphRunner.replay": (Hooked, "replay"),
    "DecodeCudaGraphRunner.execute": (Hooked, "replay"),
    "TokenToKVPoolAllocator.alloc": (HookedAllocator, "alloc"),
    "TokenToKVPoolAllocator.free": (HookedAllocator, "free"),
    "ReqToTokenPool.free": (HookedRows, "free"),
}


def hook_in() -> None:
    """Put the release's hooks around the functions above, once in a process."""
    if hasattr(Hooked.run_batch, "__wrapped__"):
        return
    specs = defaultdict(list)
    for name in release().hook_modules:
        for spec in import_module(f"{wiring.__name__}.{name}").HOOKS:
            found = _HOOKED.get(".".join(spec.target.split(".")[-2:]))
            if found is not None and spec.is_needed:
                target = f"{__name__}.{found[0].__name__}.{found[1]}"
                HookRegistry.register(target, spec.fn, spec.hook_type)
                specs[target].append(spec)
    HookRegistry.apply_hooks()
    if HOST.in_c and not all(call_directly(*each) for each in specs.items()):
        raise RuntimeError("expected hooks of the canary alone")
    if not all(hasattr(getattr(of, name), "__wrapped__") for of, name in _HOOKED.values()):
        raise RuntimeError("expected a hook on each function")
