"""Calls and time of each of the canary's functions in the scheduler's thread: all of them, unlike the canary's clock.

A profile function in C notes each entry into the canary's code and each call in it. Calls into torch and Triton count
for the function that makes them. SGLang's own code between two parts of a hook does not count. Parts longer than
LONGEST_NS are dropped: another process had the core. The cost of noting, measured on an empty function, is subtracted.
"""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

LONGEST_NS = 300_000
_CALLS = 20_000


@cache
def _module() -> ModuleType:
    from triton.runtime.build import compile_module_from_src

    return compile_module_from_src(
        Path(__file__).with_name("own_code.c").read_text(), "kv_canary_own_code"
    )


def cost_of_a_call() -> float:
    """ns that noting adds to each call, as far as it is counted."""
    namespace: dict[str, Any] = {}
    text = "def inner():\n    pass\ndef outer(n):\n    for _ in range(n):\n        inner()\n"
    exec(compile(text, "/srt/kv_canary/none.py", "exec"), namespace)
    outer = namespace["outer"]
    found = []
    for _ in range(5):
        begin = time.perf_counter_ns()
        outer(_CALLS)
        plain = time.perf_counter_ns() - begin
        _module().start(LONGEST_NS)
        outer(_CALLS)
        cells, _, _ = _module().stop()
        counted = sum(ns for _, _, _, ns in cells)
        found.append((counted - plain) / _CALLS)
    return max(0.0, min(found))


@dataclass(slots=True)
class OwnCode:
    """`start`, run, `stop`."""

    cost_ns: float = 0.0

    def start(self) -> None:
        self.cost_ns = cost_of_a_call()
        _module().start(LONGEST_NS)

    def stop(self, steps: int) -> dict[str, Any]:
        """Per step: us and calls in all, by entry into the canary's code, and by function."""
        cells, dropped, dropped_ns = _module().stop()
        entries: collections.Counter[str] = collections.Counter()
        functions: collections.Counter[str] = collections.Counter()
        calls: collections.Counter[str] = collections.Counter()
        entered: collections.Counter[str] = collections.Counter()
        for root, function, count, ns in cells:
            us = max(0.0, ns - count * self.cost_ns) / 1000
            entries[_name(root)] += us
            functions[_name(function)] += us
            calls[_name(function)] += count
            if root is function:
                entered[_name(root)] += count
        steps = max(1, steps)

        def listed(of: collections.Counter[str], by: collections.Counter[str]) -> list[Any]:
            return [
                (round(us / steps, 2), round(by[name] / steps, 2), name)
                for name, us in of.most_common()
            ]

        return {
            "own_us_a_step": round(sum(entries.values()) / steps, 1),
            "own_calls_a_step": round(sum(calls.values()) / steps, 1),
            "cost_of_a_call_ns": round(self.cost_ns),
            "dropped": dropped,
            "dropped_us_a_step": round(dropped_ns / 1000 / steps, 1),
            "own_entries": listed(entries, entered),
            "own_functions": listed(functions, calls),
        }


def _name(code: CodeType) -> str:
    return f"{Path(code.co_filename).stem}.{code.co_qualname}"
