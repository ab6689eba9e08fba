"""Floods of findings in host memory, storage and states: a part is read in each step, and the device pool has room."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.errors import CanaryViolationError
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.record import (
    VIOLATION_COLUMNS,
    Column,
    Mode,
    Reason,
    State,
    pack_identity,
    pack_writer,
)
from sglang_kv_canary.reports import violation_reporter
from sglang_kv_canary.reports.event_sink import EventSink
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary.reports.state_finding import StateFinding
from sglang_kv_canary.reports.tier_finding import Finding
from sglang_kv_canary.reports.violation import Actor
from sglang_kv_canary.reports.violation_manager import ViolationManager
from sglang_kv_canary.reports.violation_reporter import ViolationReporter
from sglang_kv_canary.state import ViolationLog

register_cpu_ci(est_time=4, suite="stage-a-test-cpu")

NEVER = 1e9  # seconds: no interval ends during a test
FORWARD = 200  # the last one that was launched
PER_STEP = violation_reporter.READ_PER_STEP


class Server:
    """Reports of a server whose steps are those of the test. `slots` are those named in the log."""

    def __init__(
        self, path: Path, log: pytest.LogCaptureFixture, mode: CanaryMode = CanaryMode.LOG
    ) -> None:
        self._path, self._log = path, log
        self.reporter = ViolationReporter(mode, EventSink(str(path), 0), NEVER)
        self.ring = ViolationLog.allocate(1024, torch.zeros(1, dtype=torch.int64), 1)
        self.manager = ViolationManager(self.ring, FlightRecorder(), self.reporter)

    def found(self, *findings: Finding | StateFinding, forward: int = FORWARD) -> None:
        for finding in findings:
            self.manager.found(finding, forward)

    def found_on_device(self, slots: Iterable[int]) -> None:
        for slot in slots:
            sequence = int(self.ring.total)
            row = np.zeros(VIOLATION_COLUMNS, dtype=np.int64)
            row[[Column.SEQUENCE, Column.REASONS, Column.SLOT]] = sequence, Reason.CONTENT, slot
            self.ring.rows[sequence] = torch.from_numpy(row)
            self.ring.total.add_(1)

    def step(self, idle: bool = False) -> None:
        self.manager.observe_total(int(self.ring.total), 0)
        self.manager.step()
        self.manager.name_waiting(idle)
        self.manager.note_work_left()

    def end_interval(self) -> None:
        self.reporter._interval_began = float("-inf")

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    @property
    def read(self) -> list[int]:
        """Slots of all findings that have been read."""
        return [event["slot"] for event in self.events("violation")]

    @property
    def text(self) -> str:
        return "\n".join(record.getMessage() for record in self._log.records)

    @property
    def named(self) -> list[int]:
        return [int(slot) for slot in re.findall(r"fail_reason=\S+ slot=(\d+)", self.text)]


@pytest.fixture
def server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Server:
    caplog.set_level(logging.INFO)
    return Server(tmp_path / "events", caplog)


def _words(forward: int, position: int) -> torch.Tensor:
    writer = pack_writer(forward, 1, Mode.EXTEND, State.LIVE)
    return torch.tensor([pack_identity(5, position), 7, 9, writer])


def _host(slot: int) -> Finding:
    """Each slot has a writer of its own, so each finding is a cause."""
    return Finding.of("host", None, PoolKind.FULL, "K", slot, _words(slot, 0), 11)


def _page(key: str, half: str = "K", slots: int = 128, writer: int = 3) -> list[Finding]:
    """One stored page whose bytes are all wrong."""
    where = ("file", key, PoolKind.FULL, half, None)
    return [Finding.of(*where, _words(writer, position), 11) for position in range(slots)]


def _state(slot: int, forward: int) -> StateFinding:
    return StateFinding(Reason.CONTENT, slot, "LIVE", Actor(forward, 1, "DECODE", "ada", None))


HOST_FLOOD = [_host(slot) for slot in range(1, 101)]


# What a step reads


def test_a_few_findings_are_read_and_named_in_order_in_the_step_that_takes_them(
    server: Server,
) -> None:
    slots = [7, 3, 9]
    server.found(*map(_host, slots))
    server.found_on_device([5])
    server.step()
    assert server.read == server.named == [*slots, 5]
    assert [event["cause"] for event in server.events("violation")] == [1, 2, 3, 4]
    assert server.events("findings_lost") == []
    assert not server.manager.has_work


@pytest.mark.parametrize("findings", [HOST_FLOOD, [_state(slot, 9) for slot in range(1, 101)]])
def test_a_flood_is_counted_at_once_and_read_over_several_steps(
    server: Server, findings: list[Finding | StateFinding]
) -> None:
    server.found(*findings)
    slots, tag = [finding.slot for finding in findings], findings[0].tag
    for steps in range(1, 8):
        server.step()
        assert server.read == slots[: steps * PER_STEP]
        assert server.manager.reported == 100
        assert server.manager.by_tag == {tag: 100}
        assert server.manager.by_tag_and_reason == {(tag, "CONTENT"): 100}
        assert server.manager.has_work
        assert not server.manager.busy  # sweeps do not wait for it
    assert server.named == slots[:20]
    assert "12 more causes wait to be named" in server.text  # of the first 32


def test_an_idle_server_reads_all(server: Server) -> None:
    server.found(*HOST_FLOOD)
    server.step(idle=True)
    assert server.read == [finding.slot for finding in HOST_FLOOD]


def test_at_the_end_all_are_named(server: Server) -> None:
    server.found(*HOST_FLOOD)
    server.step()
    server.manager.finish()
    assert server.read == server.named == [finding.slot for finding in HOST_FLOOD]
    assert not server.reporter.has_work


def test_raise_ends_the_server_at_once_with_a_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "events", caplog, CanaryMode.RAISE)
    server.found(*HOST_FLOOD[:25])
    with pytest.raises(CanaryViolationError) as raised:
        server.manager.step()
    text = str(raised.value)
    assert re.findall(r"^kv_canary violation: .* slot=(\d+)", text, re.M) == ["1", "2", "3", "4"]
    assert "and 21 more causes in the same step" in text
    assert server.read == list(range(1, 26))
    assert server.manager.reported == 25


def test_raise_says_how_many_slots_of_a_page_are_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "events", caplog, CanaryMode.RAISE)
    server.found(*_page("a"))
    with pytest.raises(CanaryViolationError, match="128 findings"):
        server.manager.step()


# How many wait


def test_what_does_not_fit_is_counted_and_told(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(violation_reporter, "MAX_WAITING", 40)
    for slot in range(1, 26):
        server.found(_host(slot), forward=100 + slot)
    server.step()
    assert server.manager.reported == server.manager.by_tag["HOST_K_FULL"] == 25
    assert server.read == list(range(1, 11))
    (lost,) = server.events("findings_lost")
    assert (lost["why"], lost["findings"]) == ("dropped", 15)
    assert (lost["first_forward"], lost["last_forward"]) == (111, 125)
    assert "15 findings were dropped while 10 causes waited" in server.text
    server.found(_host(30))  # there is room again
    server.step()
    assert server.read == [*range(1, 11), 30]


def test_causes_that_wait_for_the_log_take_room_too(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(violation_reporter, "MAX_WAITING", 160)
    monkeypatch.setattr(violation_reporter, "MAX_NAMED", 4)
    for finding in HOST_FLOOD:
        server.found(finding)
        server.step()
    assert len(server.read) == 40 + 4
    assert len(server.reporter._waiting_outside) == 40


def test_a_lost_finding_about_a_state_is_of_its_readers_forward(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(violation_reporter, "MAX_WAITING", 4)
    server.found(_state(1, 50), _state(2, 60), _state(3, 70))
    server.step()
    (lost,) = server.events("findings_lost")
    assert (lost["findings"], lost["first_forward"], lost["last_forward"]) == (2, 60, 70)


# Neither kind hides the other


def test_a_flood_leaves_room_for_the_device_pool(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(violation_reporter, "MAX_WAITING", 240)
    for _ in range(3):
        server.found(*HOST_FLOOD)
        server.step()
    server.found_on_device(range(500, 512))
    server.step()
    assert set(range(500, 512)) <= set(server.read)
    server.end_interval()
    server.step()
    assert set(range(500, 512)) <= set(server.named)


def test_a_flood_of_the_device_pool_leaves_room_for_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(violation_reporter, "MAX_WAITING", 60)
    server.found_on_device(range(500, 700))
    server.step()
    assert server.read == list(range(500, 500 + PER_STEP))
    server.found(*map(_host, range(1, 5)))
    server.step()
    assert server.read[PER_STEP:] == [1, 2, 3, 4, *range(516, 528)]
    server.end_interval()
    server.step()
    assert {1, 2, 3, 4} <= set(server.named)


def test_together_they_take_no_more_than_a_step_may_read(server: Server) -> None:
    server.found(*HOST_FLOOD)
    server.found_on_device(range(500, 600))
    for steps in range(1, 4):
        server.step()
        assert len(server.read) == steps * PER_STEP
    assert sum(slot >= 500 for slot in server.read) == 3 * PER_STEP * 3 // 4


# Stored pages


def test_the_slots_of_a_damaged_page_are_read_together(server: Server) -> None:
    server.found(*_page("a"), *_page("a", "V"))
    server.step()
    assert server.manager.by_tag == {"FILE_K_FULL": 128, "FILE_V_FULL": 128}
    (told,) = server.events("cause")
    assert (told["findings"], told["key"]) == (256, "a")
    assert (told["extent"]["first_position"], told["extent"]["last_position"]) == (0, 127)
    seen = [(event["tag"], event["stored_position"]) for event in server.events("violation")]
    halves = ("FILE_K_FULL", "FILE_V_FULL")
    assert seen == [(tag, position) for tag in halves for position in (0, 127)]
    assert server.reporter.distinct == 256


def test_a_flood_of_pages_names_each_page(server: Server) -> None:
    keys = [f"key{i}" for i in range(40)]
    server.found(*(finding for key in keys for finding in _page(key, slots=64)))
    for steps in range(1, 4):
        server.step()
        assert len({e["key"] for e in server.events("violation")}) == min(40, steps * PER_STEP)
    assert [event["key"] for event in server.events("cause")] == keys
    assert server.events("findings_lost") == []


@pytest.mark.parametrize(
    "other",
    [
        _page("b", slots=1),
        _page("a", "V", slots=1),
        _page("a", slots=1, writer=4),
        [Finding.of_other_token("file", "a", PoolKind.FULL, _words(3, 0), 1, 5)],
        [Finding.of_records("file", "a", PoolKind.FULL)],
    ],
    ids=["page", "half", "writer", "reason", "records"],
)
def test_what_has_another_cause_or_tag_is_read_alone(server: Server, other: list[Finding]) -> None:
    server.found(*_page("a", slots=3), *other, *_page("a", slots=3))
    server.step()
    assert len(server.events("violation")) == 3
    assert server.manager.reported == 7
    assert sum(cause.findings for cause in server.reporter._causes.values()) == 7


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
