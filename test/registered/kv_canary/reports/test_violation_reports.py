"""From findings to causes: what is one cause, when it is named in the log, and what its events hold."""

from __future__ import annotations

import json
import logging
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_kv_canary
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.analysis.overview import Overview
from sglang_kv_canary.analysis.text import headline
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.errors import CanaryViolationError
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import PREV_ANCHOR, PREV_UNREACHABLE, Column
from sglang_kv_canary.reports import cause, known_findings, violation_reporter
from sglang_kv_canary.reports.event_loader import load_events
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary.reports.safe_text import safe_text
from sglang_kv_canary.reports.story import Story
from sglang_kv_canary.reports.violation import Violation, render
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

LINE = re.compile(
    r"^kv_canary violation: launch_tag=(\S+) fail_reason=(\S+) slot=(-?\d+) position=(-?\d+)$", re.M
)
NEVER = 1e9  # seconds: no interval ends during a test
HOSTILE = (
    'x"\n[2026-11-20 11:38:51] kv-canary violation #7: CONTENT\r\x1b]0;owned\x07\x1b[2J\u202e\u2028'
)


class Log:
    """What has been logged about violations, as text."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def text(self) -> str:
        ours = (
            r for r in self._caplog.records if r.name.startswith(f"{sglang_kv_canary.__name__}.")
        )
        return "\n".join(record.getMessage() for record in ours)

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """(launch tag, reasons, slot, position) of each machine-readable line."""
        return LINE.findall(self.text)

    @property
    def slots(self) -> list[int]:
        return [int(slot) for _, _, slot, _ in self.lines]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO)
    return Log(caplog)


def _damage(rig: ManagerRig, row: int, *positions: int) -> list[int]:
    """Other bytes in K of these positions; returns the slots."""
    slots = [rig.slot(row, position) for position in positions]
    rig.pool.k_buffer[1][slots] += 1
    return slots


def _events(path: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


def _let_the_interval_end(rig: ManagerRig) -> None:
    rig.manager.violations._reporter._interval_began = float("-inf")


def _share_a_prefix(rig: ManagerRig, readers: int, length: int = 8) -> None:
    """Rows 1 to `readers` lead to one prefix."""
    rig.result(rig.extend(1, range(length)))
    rig.rows.req_to_token[2 : readers + 1] = rig.rows.req_to_token[1]
    rig.lengths.update(dict.fromkeys(range(2, readers + 1), length))


def _idle(rig: ManagerRig) -> None:
    """Until nothing waits."""
    for _ in range(20):
        _let_the_interval_end(rig)
        rig.manager.on_idle()


# What is one cause


def test_halves_sides_and_readers_of_one_fault_are_one_cause(log: Log, tmp_path: Path) -> None:
    rig = ManagerRig(event_file=str(tmp_path / "events"))
    rig.extend(1, range(20))
    rig.extend(2, range(20))
    slot = rig.slot(1, 5)
    rig.rows.req_to_token[2, 5] = rig.rows.req_to_token[1, 5]
    rig.rows.req_to_token[1:3, 6] = 0
    rig.manager.ledger.record(SlotEventKind.FREE, PoolKind.FULL, torch.tensor([slot]), 1)
    rig.decode([1, 2])
    rig.settle()
    assert log.slots.count(slot) == 1
    report = next(r for r in log.text.split("kv_canary violation:") if "USE_AFTER_FREE" in r)
    assert "; HEAD and TAIL, K and V of FULL; 2 readers; forward 3; 8 findings" in report
    assert 'checked by request "req-1"' in report
    assert '  written by request "req-1"' in report
    assert '             request "req-2"' in report
    events = [e for e in _events(tmp_path / "events", "violation") if e["slot"] == slot]
    assert len(events) == 8  # the event file has each finding
    assert len({event["cause"] for event in events}) == 1


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        (["TAIL_K_FULL"], "TAIL, K of FULL"),
        (["TAIL_K_FULL", "TAIL_V_FULL"], "TAIL, K and V of FULL"),
        (["TAIL_V_SWA", "HEAD_V_SWA"], "HEAD and TAIL, V of SWA"),
        (["SWEEP_K_SWA", "HEAD_K_SWA", "TAIL_K_SWA"], "HEAD, TAIL and SWEEP, K of SWA"),
        (["HEAD_K_FULL", "TAIL_V_FULL"], "HEAD_K_FULL, TAIL_V_FULL"),  # not in all four places
    ],
)
def test_where_a_cause_was_seen_is_told_in_words(tags: list[str], words: str) -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    _damage(rig, 1, 5)
    rig.decode([1])
    (found,) = rig.settle()
    seen = cause.Cause(1, replace(found, tag=tags[0]))
    for tag in tags:
        seen.fold(replace(found, tag=tag))
    seen.findings += 1  # a repeat
    (extent,) = re.findall(r"^  extent +(.*)$", seen.text(Story()), re.M)
    findings = len(tags) + 1
    assert extent == f"1 slot, position 5; {words}; 1 reader; forward 2; {findings} findings"


@pytest.mark.parametrize(
    ("prev_slot", "words"),
    [
        (None, "LIVE"),
        (PREV_ANCHOR, "LIVE, first of its chain"),
        (PREV_UNREACHABLE, "LIVE, predecessor not readable"),
        (17, "LIVE, predecessor slot 17"),
    ],
)
def test_a_report_names_the_predecessor_that_the_check_used(
    prev_slot: int | None, words: str
) -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    _damage(rig, 1, 5)
    rig.decode([1])
    (found,) = rig.settle()
    shown = render(replace(found, prev_slot=prev_slot))
    assert re.findall(r"^  record +(.*)$", shown, re.M) == [words]


def test_a_reader_without_a_request_on_record_has_no_name_in_the_report() -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    _damage(rig, 1, 5)
    rig.decode([1])
    (found,) = rig.settle()
    assert 'checked by request "req-1" (row 1), forward 2' in render(found)
    nameless = replace(found, reader=replace(found.reader, request_id=None))
    assert "checked by a request not on record (row 1), forward 2" in render(nameless)


def test_the_row_of_each_reader_is_a_cause_of_its_own_where_no_slot_is_at_fault(log: Log) -> None:
    rig = ManagerRig()
    for row in (1, 2):
        rig.extend(row, range(20))
        rig.rows.req_to_token[row, 6] = 0
    rig.decode([1, 2])
    rig.settle()
    assert [reasons for _, reasons, _, _ in log.lines] == ["UNMAPPED_SLOT"] * 2


def test_causes_are_numbered_from_1_without_gaps(log: Log, tmp_path: Path) -> None:
    rig = ManagerRig(event_file=str(tmp_path / "events"))
    rig.extend(1, range(20))
    for position in (3, 7, 11):
        _damage(rig, 1, position)
        for _ in range(3):  # repeats, which have sequence numbers of their own
            rig.decode([1])
        rig.settle()
    assert re.findall(r"kv-canary violation #(\d+):", log.text) == ["1", "2", "3"]
    events = _events(tmp_path / "events", "violation")
    assert [event["cause"] for event in events] == [1, 2, 3]
    assert events[-1]["sequence"] > 2


def test_a_slot_that_was_written_again_is_another_cause(log: Log) -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    (slot,) = _damage(rig, 1, 5)
    rig.decode([1])
    rig.settle()
    rig.lengths[1] = 0
    rig.allocator.clear()
    rig.manager.ledger.record(SlotEventKind.CLEAR, PoolKind.FULL, None, 1)
    rig.extend(1, range(20))
    assert _damage(rig, 1, 5) == [slot]
    rig.decode([1])
    rig.settle()
    assert log.slots == [slot, slot]


def test_a_repeat_is_of_the_same_request_not_of_the_same_row() -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    _damage(rig, 1, 5)
    rig.decode([1])
    rig.settle()
    row = rig.manager.violations._ring.rows[:1].numpy().repeat(3, axis=0)
    row[:, Column.READER_FORWARD] = 101, 102, 103
    recorder = FlightRecorder()
    for forward, request_id in ((101, "ada"), (102, "ada"), (103, "bob")):
        recorder.begin_step([(1, request_id), (2, "cleo")])
        recorder.note_forward(forward, "DECODE")
    ada, again, bob = known_findings.finding_keys(row, recorder)
    assert ada == again != bob


# When a cause is named


def test_each_cause_found_within_an_interval_is_named_in_it(log: Log) -> None:
    """Two damaged prefixes that are read shortly after each other, with no event file."""
    rig = ManagerRig(log_every_s=NEVER)
    for row in (1, 2):
        rig.extend(row, range(20))
    slots = [*_damage(rig, 1, 5), *_damage(rig, 2, 9)]
    for row in (1, 2):
        rig.result(rig.decode([row]))
    assert log.slots == slots
    assert "event file" not in log.text


def test_20_causes_are_named_per_interval_and_the_others_wait_their_turn(log: Log) -> None:
    rig = ManagerRig(log_every_s=NEVER)
    rig.extend(1, range(60))
    slots = _damage(rig, 1, *range(50))
    rig.result(rig.decode([1]))
    assert log.slots == slots[:20]
    assert "30 more causes wait to be named, at most 20 at a time" in log.text
    rig.result(rig.decode([1]))
    assert len(log.slots) == 20
    for named in (40, 50):
        _let_the_interval_end(rig)
        rig.result(rig.decode([1]))
        assert log.slots == slots[:named]


def test_a_step_without_findings_names_those_whose_turn_it_is(log: Log) -> None:
    rig = ManagerRig(log_every_s=NEVER)
    rig.extend(1, range(60))
    slots = _damage(rig, 1, *range(25))
    rig.result(rig.decode([1]))
    rig.extend(2, range(5))
    _let_the_interval_end(rig)
    rig.result(rig.decode([2]))
    assert log.slots == slots


def test_an_idle_server_names_what_waits_without_waiting_for_a_long_interval(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = ManagerRig(log_every_s=NEVER)
    rig.extend(1, range(60))
    slots = _damage(rig, 1, *range(30))
    step = rig.decode([1])
    rig.recorder.result_arrived(step)
    rig.manager.drain()
    assert len(log.slots) == violation_reporter.READ_PER_STEP
    rig.manager.on_idle()
    assert len(log.slots) == 20  # a second has not passed
    monkeypatch.setattr(violation_reporter, "IDLE_INTERVAL_S", 0.0)
    rig.manager.on_idle()
    assert log.slots == slots


def test_the_event_file_is_pointed_to_only_where_there_is_one(log: Log, tmp_path: Path) -> None:
    path = tmp_path / "events"
    rig = ManagerRig(log_every_s=NEVER, event_file=str(path))
    rig.extend(1, range(60))
    slots = _damage(rig, 1, *range(30))
    rig.result(rig.decode([1]))
    assert "10 more causes wait to be named, at most 20 at a time (all are in the event file)" in (
        log.text
    )
    assert [event["slot"] for event in _events(path, "violation")] == slots


def test_what_does_not_fit_the_backlog_is_counted_and_said(
    log: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(violation_reporter, "MAX_WAITING", 30)
    rig = ManagerRig(log_every_s=NEVER, event_file=str(tmp_path / "events"))
    rig.extend(1, range(60))
    slots = _damage(rig, 1, *range(50))
    rig.result(rig.decode([1]))
    assert len(_events(tmp_path / "events", "violation")) == 30
    _let_the_interval_end(rig)
    rig.manager.drain()
    assert "20 findings were dropped while 30 causes waited" in log.text
    assert log.slots == slots[:30]
    rig.result(rig.decode([1]))  # there is room again
    _let_the_interval_end(rig)
    rig.manager.drain()
    assert sorted(log.slots) == sorted(slots)


def test_a_flood_is_looked_into_over_several_steps(
    log: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(violation_reporter, "READ_PER_STEP", 4)
    path = tmp_path / "events"
    rig = ManagerRig(log_every_s=0.0, event_file=str(path))
    rig.extend(1, range(60))
    slots = _damage(rig, 1, *range(30))
    for _ in range(3):  # the same findings come again meanwhile
        before = len(_events(path, "violation"))
        rig.recorder.result_arrived(rig.decode([1]))
        rig.manager.drain()
        read = [event["slot"] for event in _events(path, "violation")]
        assert read == slots[: len(read)]
        assert (
            before < len(read) <= before + 8
        )  # in two calls: one after the launch, one with the result
    assert rig.settle()
    assert log.slots == slots
    reporter = rig.manager.violations._reporter
    assert (reporter.distinct, reporter.repeats) == (30, 60)
    assert {c.findings for c in reporter._causes.values()} == {3}


def test_at_the_end_everything_is_named(log: Log) -> None:
    rig = ManagerRig(log_every_s=NEVER)
    rig.extend(1, range(60))
    slots = _damage(rig, 1, *range(50))
    rig.recorder.result_arrived(rig.decode([1]))  # and nothing has been handed over yet
    rig.manager.finish(1.0)
    assert log.slots == slots
    rig.manager.finish(1.0)
    assert log.slots == slots


@pytest.mark.parametrize("is_dead", [False, True])
def test_at_the_end_findings_of_forwards_without_results_are_named(is_dead: bool, log: Log) -> None:
    """Those of a request that has given its row back are moot."""
    rig = _found_in_flight(is_dead)
    rig.manager.finish(1.0)
    violations = rig.manager.violations
    assert (violations.reported, violations.moot) == (not is_dead, is_dead)
    assert log.slots == [rig.slot(1, 5)] * (not is_dead)
    rig.manager.finish(1.0)
    assert len(log.slots) == (not is_dead)


@pytest.mark.parametrize("is_released", [False, True])
def test_nothing_is_read_around_a_finding_once_memory_is_given_back(is_released: bool) -> None:
    """What was found before has been looked at before. A finding whose result comes later is reported all the same."""
    rig = _found_in_flight(False)
    step = rig.recorder.step_of(rig.recorder.newest)
    rig.recorder.result_arrived(step)
    _damage(rig, 1, 7)
    late = rig.decode([1])
    if is_released:
        rig.manager.before_memory_goes()
    rig.recorder.result_arrived(late)
    rig.manager.finish(1.0)
    causes = rig.manager.violations._reporter._causes.values()
    assert {c.first.slot: c.scene is not None for c in causes} == {
        rig.slot(1, 5): True,
        rig.slot(1, 7): not is_released,
    }


@pytest.mark.parametrize("is_dead", [False, True])
def test_the_end_of_a_server_in_mode_raise_is_no_success(is_dead: bool) -> None:
    """A finding of a forward whose result does not come fails the program, unless the request was dead."""
    rig = _found_in_flight(is_dead, mode=CanaryMode.RAISE)
    expected = nullcontext() if is_dead else pytest.raises(CanaryViolationError, match="CONTENT")
    with expected:
        rig.manager.finish(1.0)


def _found_in_flight(is_dead: bool, **settings: Any) -> ManagerRig:
    """The result of a forward that reads damage has not arrived."""
    rig = ManagerRig(**settings)
    rig.extend(1, range(20))
    rig.settle()
    _damage(rig, 1, 5)
    rig.decode([1])
    if is_dead:
        rig.recorder.row_released(1)
    return rig


def test_a_clean_server_ends_without_a_word(log: Log) -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    rig.decode([1])
    rig.settle()
    rig.manager.finish(1.0)
    assert log.text == ""


# Bounds


def test_findings_remembered_are_bounded(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_findings, "MAX_KNOWN", 8)
    rig = ManagerRig()
    rig.extend(1, range(60))
    slots = _damage(rig, 1, *range(20))
    for _ in range(3):
        rig.decode([1])
    rig.settle()
    reporter = rig.manager.violations._reporter
    assert len(reporter._known) == 8
    assert log.slots == slots  # one that was forgotten is folded into its cause again
    assert sum(c.findings for c in reporter._causes.values()) == 60


def test_causes_remembered_are_bounded(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(violation_reporter, "MAX_CAUSES", 8)
    rig = ManagerRig()
    rig.extend(1, range(60))
    slots = _damage(rig, 1, *range(20))
    rig.decode([1])
    rig.settle()
    assert len(rig.manager.violations._reporter._causes) == 8
    assert log.slots == slots


def test_events_of_a_cause_are_bounded_and_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cause, "MAX_READERS", 2)
    monkeypatch.setattr(violation_reporter, "MAX_EVENTS", 3)
    path = tmp_path / "events"
    rig = ManagerRig(event_file=str(path), log_every_s=NEVER)
    rig.extend(1, range(20))
    (slot,) = _damage(rig, 1, 5)
    for row in (1, 2, 3, 4, 5):  # new readers of the same damage
        rig.rows.req_to_token[row] = rig.rows.req_to_token[1]
        rig.lengths[row] = 20
        rig.result(rig.decode([row]))
    assert len(_events(path, "violation")) == 3
    rig.result(rig.decode([1]))
    (told,) = _events(path, "cause")  # when it was found; since then, the interval has not ended
    assert (told["findings"], told["extent"]["readers"]) == (1, 1)
    _let_the_interval_end(rig)
    rig.result(rig.decode([1]))
    _, summary = _events(path, "cause")
    assert (summary["cause"], summary["slot"], summary["reasons"]) == (1, slot, ["CONTENT"])
    assert (summary["findings"], summary["tags"]) == (6, ["TAIL_K_FULL"])
    assert [reader["request_id"] for reader in summary["readers"]] == ["req-1", "req-2"]
    assert summary["more_readers"]
    _let_the_interval_end(rig)
    rig.result(rig.decode([1]))
    assert len(_events(path, "cause")) == 2  # not until there are twice as many
    rig.manager.finish(1.0)
    assert [event["findings"] for event in _events(path, "cause")] == [1, 6, 8]


@pytest.mark.parametrize(
    ("halves", "readers", "told", "said"),
    [
        ("K", 100, [1, 100], "at least 64 requests read damage"),
        ("KV", 40, [2, 80], "; 40 requests read damage"),
        ("KV", 12, [2], "; 12 requests read damage"),  # a `violation` event names each
    ],
)
def test_events_of_an_idle_server_name_all_readers_or_say_that_they_do_not(
    halves: str,
    readers: int,
    told: list[int],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(violation_reporter, "IDLE_INTERVAL_S", NEVER)
    path = tmp_path / "events"
    rig = ManagerRig(
        real=make_mha_pool(size=2048),
        event_file=str(path),
        max_requests=readers + 1,
        log_every_s=NEVER,
    )
    _share_a_prefix(rig, readers)
    slot = rig.slot(1, 5)
    for half in halves:
        getattr(rig.pool, f"{half.lower()}_buffer")[1][slot] += 1
    for row in range(1, readers + 1):
        rig.result(rig.decode([row]))
    _idle(rig)
    assert said in headline(Overview.of({"": load_events(path)}))
    assert [event["findings"] for event in _events(path, "cause")] == told
    for row in range(1, min(readers, 4)):  # repeats name nobody
        rig.result(rig.decode([row]))
    _idle(rig)
    assert len(_events(path, "cause")) == len(told)


def test_untold_readers_of_a_flood_take_a_bounded_number_of_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 20 `cause` events an interval, one a cause; and of a cause at most one for each reader that it lists."""
    monkeypatch.setattr(cause, "MAX_READERS", 4)
    monkeypatch.setattr(violation_reporter, "MAX_EVENTS", 1)
    monkeypatch.setattr(violation_reporter, "IDLE_INTERVAL_S", NEVER)
    path = tmp_path / "events"
    rig = ManagerRig(real=make_mha_pool(size=2048), event_file=str(path), log_every_s=NEVER)
    causes, readers = 30, 8
    _share_a_prefix(rig, readers, length=causes)
    _damage(rig, 1, *range(causes))
    rig.result(rig.decode([1]))
    first = len(_events(path, "cause"))
    assert first == causes
    monkeypatch.setattr(cause.Cause, "has_doubled", False)  # only readers bring events
    for row in range(2, readers + 1):
        rig.result(rig.decode([row]))
        rig.settle()
        assert len(_events(path, "cause")) == first  # the interval has not ended
    for written in (20, 30, 30):
        _let_the_interval_end(rig)
        rig.manager.drain()
        told = [event["cause"] for event in _events(path, "cause")[first:]]
        assert len(told) == len({*told}) == written
    assert all(event["more_readers"] for event in _events(path, "cause")[first:])
    rig.result(rig.decode(range(1, readers + 1)))
    _idle(rig)
    assert len(_events(path, "cause")) == first + causes  # it is told that there are others
    found = rig.manager.violations._reporter._causes.values()
    assert {each.readers_told for each in found} == {cause.MAX_READERS + 1}


def test_many_readers_are_counted_in_the_report(log: Log) -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    _damage(rig, 1, 5)
    for row in range(2, 8):
        rig.rows.req_to_token[row] = rig.rows.req_to_token[1]
        rig.lengths[row] = 20
    rig.decode(range(1, 8))
    rig.settle()
    assert len(re.findall(r'request "req-\d" \(row \d\), forward 2 ', log.text)) == 4
    assert "; 7 readers; " in log.text


# Words


def test_a_line_for_machines_comes_before_each_report(log: Log) -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    rig.extend(2, range(20))
    (slot,) = _damage(rig, 1, 5)
    rig.rows.req_to_token[2, 7] = 0
    rig.decode([1, 2])
    rig.settle()
    assert set(log.lines) == {
        ("TAIL_K_FULL", "CONTENT", str(slot), "5"),
        ("HEAD_K_FULL", "UNMAPPED_SLOT", "-1", "7"),
    }
    rest = LINE.split(log.text)[5::5]
    assert len(rest) == len(log.lines)
    assert all(text.startswith("\nkv-canary violation #") for text in rest)


def test_raise_names_the_first_causes_with_their_lines() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    rig.extend(1, range(20))
    slots = _damage(rig, 1, *range(6))
    rig.decode([1])
    with pytest.raises(CanaryViolationError) as raised:
        rig.settle()
    text = str(raised.value)
    assert [int(slot) for _, _, slot, _ in LINE.findall(text)] == slots[:4]
    assert text.endswith("kv-canary: and 2 more causes in the same step")


def test_a_double_free_is_the_allocators(log: Log, tmp_path: Path) -> None:
    path = tmp_path / "events"
    rig = ManagerRig(event_file=str(path))
    rig.extend(1, range(20))
    rig.extend(2, range(20))
    slot = rig.slot(1, 5)
    for _ in range(2):
        rig.manager.ledger.record(SlotEventKind.FREE, PoolKind.FULL, torch.tensor([slot]), 1)
        rig.decode([2])
    rig.settle()
    ((tag, reasons, _, _),) = log.lines
    assert (tag, reasons) == ("FREE_FULL", "DOUBLE_FREE")
    assert f"DOUBLE_FREE by the allocator, slot {slot} of FULL" in log.text
    assert "HEAD_K_FULL" not in log.text
    (event,) = _events(path, "violation")
    assert event["tag"] == "FREE_FULL"
    assert rig.manager.violations.by_tag_and_reason == {("FREE_FULL", "DOUBLE_FREE"): 1}


def test_content_is_called_by_what_it_is_and_old_names_stay_for_a_version(tmp_path: Path) -> None:
    path = tmp_path / "events"
    rig = ManagerRig(event_file=str(path))
    rig.extend(1, range(20))
    (slot,) = _damage(rig, 1, 5)
    rig.decode([1])
    rig.settle()
    (event,) = _events(path, "violation")
    written = int(rig.manager.groups[0].records("K", Side.TAIL)[slot, 2])
    (violation,) = rig.reported
    assert violation.content_written == written != violation.content_now
    assert (event["writer_weights"], event["reader_weights"]) == (None, None)  # not the problem
    assert event["schema"] == 2
    assert int(event["content_written"], 16) == written % (1 << 64)
    assert event["stored_content"] == event["content_written"]
    assert event["expected_content"] == event["content_now"] != event["content_written"]
    old = {
        k: v
        for k, v in event.items()
        if k not in ("schema", "cause", "content_written", "content_now")
    }
    assert Violation.from_event(old) == violation
    shown = render(Violation.from_event(event))
    assert f"written {event['content_written']}, now {event['content_now']}" in shown


# Request ids


def _serve_damage(rig: ManagerRig, request_id: str, reader: str | None = None) -> None:
    """The request reads what has changed, or `reader` in its row."""
    _run_as(rig, request_id)
    rig.result(rig.extend(1, range(10)))
    _damage(rig, 1, 4)
    _run_as(rig, reader or request_id)
    rig.result(rig.decode([1]))


def _run_as(rig: ManagerRig, request_id: str) -> None:
    def run(batch: Any, slots: torch.Tensor, fail: bool) -> Any:
        step = rig.recorder.begin_step((r, request_id) for r in batch.req_pool_indices.tolist())
        try:
            rig._forward(batch, slots, fail)
        finally:
            rig.recorder.end_step()
        return step

    rig._run = run


def test_a_request_id_cannot_write_to_the_log(log: Log, tmp_path: Path) -> None:
    path = tmp_path / "events"
    rig = ManagerRig(event_file=str(path))
    _serve_damage(rig, HOSTILE)
    rig.settle()
    assert len(log.lines) == 1
    lines = [line for line in log.text.splitlines() if "11:38:51" in line]
    assert lines
    assert all(
        line.startswith(("  request", "  checked by request", "  written by", "  beside"))
        for line in lines
    )
    assert log.text.replace("\n", "").isprintable()
    (event,) = _events(path, "violation")
    assert event["reader"]["request_id"] == HOSTILE
    assert render(Violation.from_event(event)).replace("\n", "").isprintable()


def test_a_request_id_cannot_write_to_the_error_of_a_server_that_raises() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    with pytest.raises(CanaryViolationError) as raised:
        _serve_damage(rig, HOSTILE)
    assert str(raised.value).replace("\n", "").isprintable()


def test_long_request_ids_are_cut(log: Log, tmp_path: Path) -> None:
    path = tmp_path / "events"
    rig = ManagerRig(event_file=str(path))
    _serve_damage(rig, "z" * 100_000)
    rig.settle()
    assert f'"{"z" * 125}..."' in log.text
    (event,) = _events(path, "violation")
    assert event["reader"]["request_id"] == "z" * 1024


def test_no_event_holds_a_long_request_id_as_a_whole(tmp_path: Path) -> None:
    """Neither those of slots beside the finding, nor of another request in the row."""
    path = tmp_path / "events"
    rig = ManagerRig(event_file=str(path))
    _serve_damage(rig, "y" * 100_000, reader="z" * 100_000)
    rig.settle()
    (told,) = _events(path, "cause")
    ids = {"y" * 1024, "z" * 1024}
    assert {slot["request_id"] for slot in told["scene"]["beside"]} - {None} == ids
    assert told["scene"]["row_shared"]["request_id"] in ids
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert max(len(text) for event in events for text in _texts(event)) == 1024


def _texts(value: Any) -> list[str]:
    """All that `value` holds, to any depth."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [text for part in parts for text in _texts(part)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ada-1", "ada-1"),
        ("Zoë 你好", "Zoë 你好"),
        ('a"b\\c', 'a\\"b\\\\c'),
        ("a\r\nb\x1b[2J\x00\x7f\x9b", "a\\r\\nb\\x1b[2J\\x00\\x7f\\x9b"),
        ("\u202eabc\u2066\u200f\u2028\ufeff", "\\u202eabc\\u2066\\u200f\\u2028\\ufeff"),
        ("\udc80", "\\udc80"),
        ("x" * 128, "x" * 128),
        ("x" * 129, "x" * 125 + "..."),
        ("\n" * 129, "\\n" * 62 + "..."),
    ],
    ids=(
        "plain",
        "letters",
        "quotes",
        "controls",
        "bidi",
        "surrogate",
        "fits",
        "cut",
        "cut-escapes",
    ),
)
def test_safe_text(text: str, shown: str) -> None:
    assert safe_text(text) == shown
    assert len(shown) <= 128


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
