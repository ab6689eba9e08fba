"""Violations are counted by tag and reason, whatever the rows of earlier steps were."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.record import VIOLATION_COLUMNS, Column, Reason
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary.reports.violation import reason_names, tag_name
from sglang_kv_canary.reports.violation_manager import ViolationManager
from sglang_kv_canary.reports.violation_reporter import ViolationReporter
from sglang_kv_canary.state import ViolationLog

register_cpu_ci(est_time=4, suite="stage-a-test-cpu")

CAPACITY = 16
TAGS = (0, 1, 4)
REASONS = (Reason.TOKEN, Reason.POSITION, Reason.TOKEN | Reason.POSITION, Reason.STALE_WEIGHTS)


class NoSink:
    """Nobody reads the events here."""

    def emit(self, event: dict) -> None: ...


class Ring:
    """A real ring and its reader. `append` is what kernels do."""

    def __init__(self) -> None:
        self.log = ViolationLog.allocate(CAPACITY, torch.zeros(1, dtype=torch.int64))
        reporter = ViolationReporter(CanaryMode.LOG, NoSink(), 1e9)
        self.manager = ViolationManager(self.log, FlightRecorder(), reporter)

    def append(self, tag: int, reasons: int) -> None:
        sequence = int(self.log.total)
        row = np.zeros(VIOLATION_COLUMNS, dtype=np.int64)
        row[[Column.SEQUENCE, Column.TAG, Column.REASONS]] = sequence, tag, reasons
        self.log.rows[sequence % CAPACITY] = torch.from_numpy(row)
        self.log.total.add_(1)

    def step(self) -> None:
        self.manager.observe_total(int(self.log.total))
        self.manager.step()


STEPS = st.lists(
    st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(REASONS)), max_size=2 * CAPACITY),
    max_size=6,
)


@settings(max_examples=50, deadline=None)
@given(STEPS)
@example([[(1, REASONS[1])], [(0, REASONS[0])], [(4, REASONS[3]), (1, REASONS[1])]])
def test_counts_are_those_of_the_rows_that_the_ring_still_has(
    steps: list[list[tuple[int, Reason]]],
) -> None:
    ring, expected, overwritten = Ring(), Counter(), 0
    for rows in steps:
        for tag, reasons in rows:
            ring.append(tag, reasons)
        ring.step()
        overwritten += max(0, len(rows) - CAPACITY)
        for tag, reasons in rows[-CAPACITY:]:
            expected.update((tag_name(tag, reasons), reason) for reason in reason_names(reasons))
    assert ring.manager.by_tag_and_reason == expected
    assert ring.manager.overwritten == overwritten
    assert ring.manager.reported == sum(min(len(rows), CAPACITY) for rows in steps)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
