"""Measures the host time that the canary spends in the scheduler's thread."""

from __future__ import annotations

import time
from typing import Any


class HostClock:
    """`with clock:` around the canary's own code. Nested sections count once. `spent_ns` never decreases."""

    def __init__(self) -> None:
        self.spent_ns = 0
        self._depth = 0
        self._since = 0

    def __enter__(self) -> HostClock:
        if self._depth == 0:
            self._since = time.perf_counter_ns()
        self._depth += 1
        return self

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.spent_ns += time.perf_counter_ns() - self._since
