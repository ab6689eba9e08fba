"""Violations are counted by tag and reason, whatever the rows of earlier steps were."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.record import VIOLATION_COLUMNS, Column, Reason
from sglang_kv_canary.reports import gap, losses, violation_reporter
from sglang_kv_canary.reports.classify import BugClass
from sglang_kv_canary.reports.event_sink import EventSink
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary.reports.moot import are_moot
from sglang_kv_canary.reports.violation import reason_names, tag_name
from sglang_kv_canary.reports.violation_manager import ViolationManager
from sglang_kv_canary.reports.violation_reporter import MOST_TAKEN, ViolationReporter
from sglang_kv_canary.state import READER_FORWARDS, ViolationLog

register_cpu_ci(est_time=4, suite="stage-a-test-cpu")

CAPACITY = 16
REQUEST_ROWS = 64
TAGS = (0, 1, 4)
REASONS = (Reason.TOKEN, Reason.POSITION, Reason.TOKEN | Reason.POSITION, Reason.STALE_WEIGHTS)


class Ring:
    """A real ring and its reader. `append` is what kernels do."""

    def __init__(self, capacity: int = CAPACITY, events: str = "") -> None:
        self.log = ViolationLog.allocate(capacity, torch.zeros(1, dtype=torch.int64), REQUEST_ROWS)
        halves = {PoolKind.FULL: ("K", "V")}
        self.reporter = ViolationReporter(CanaryMode.LOG, EventSink(events, 0), 1e9, halves=halves)
        self.manager = ViolationManager(self.log, FlightRecorder(), self.reporter)

    def append(self, tag: int, reasons: int, slot: int = 0, forward: int = 0, row: int = 0) -> None:
        sequence = int(self.log.total)
        found = np.zeros(VIOLATION_COLUMNS, dtype=np.int64)
        columns = [Column.SEQUENCE, Column.TAG, Column.REASONS, Column.SLOT, Column.READER_FORWARD]
        found[[*columns, Column.READER_ROW]] = sequence, tag, reasons, slot, forward, row
        self.log.rows[sequence % len(self.log.rows)] = torch.from_numpy(found)
        self.log.readers[row, forward % READER_FORWARDS] = forward
        self.log.total.add_(1)

    def step(self, forward: int = 0) -> None:
        self.manager.observe_total(int(self.log.total), forward)
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


def _flood(ring: Ring, slots: Sequence[int], steps: int) -> None:
    """Each step finds the damage of all `slots` again, and names what waits."""
    for _ in range(steps):
        for slot in slots:
            ring.append(0, Reason.CONTENT, slot)
        ring.step()
        ring.manager.name_waiting(idle=True)


def test_of_damage_that_stays_a_part_is_looked_at_each_step_and_all_of_it_is_counted() -> None:
    ring, slots, steps = Ring(1024), range(1, 601), 8
    _flood(ring, slots, steps)
    reporter = ring.reporter
    assert ring.manager.reported == len(slots) * steps
    assert ring.manager.by_tag_and_reason["HEAD_K_FULL", "CONTENT"] == len(slots) * steps
    assert reporter.causes == len(slots)
    assert reporter.distinct + reporter.repeats == len(slots) * steps
    looked_at = sum(cause.findings for cause in reporter._causes.values())
    _flood(ring, slots, 1)
    more = sum(cause.findings for cause in reporter._causes.values()) - looked_at
    assert 0 < more <= MOST_TAKEN < len(slots)


def test_what_earlier_forwards_have_found_is_known_while_later_ones_find_more() -> None:
    """A request's KV waits for the findings of its own forwards, and not for those of all others."""
    ring = Ring()
    manager, recorder = ring.manager, ring.manager._recorder
    for forward in (5, 6):  # their results are not in
        recorder.begin_step([(1, "chat")])
        recorder.note_forward(forward, "DECODE")
        recorder.end_step()
    ring.append(0, Reason.TOKEN, forward=6)
    ring.step(forward=6)
    assert manager.busy
    assert manager.handed_over() == 5
    manager.observe_total(2, 7)  # a row that is not fetched yet
    assert manager.handed_over() == 5


def test_a_forward_whose_rows_are_being_fetched_is_not_known() -> None:
    ring = Ring()
    ring.append(0, Reason.TOKEN, forward=3)
    ring.manager.observe_total(1, 3)
    assert ring.manager.handed_over() == 0
    ring.manager.step()
    assert ring.manager.handed_over() == 3


def test_rows_that_come_while_the_ring_is_copied_are_counted_as_overwritten() -> None:
    ring = Ring()
    ring.append(0, Reason.TOKEN)
    ring.step()
    rows, later = ring.log.rows.clone(), torch.tensor([1 + CAPACITY + 3])
    ring.manager._on_rows((torch.tensor([2]), rows, later, ring.log.readers), None)
    ring.manager.step()
    assert ring.manager.overwritten == 3
    assert ring.manager._fetched == 4


class _Lost:
    """Forwards 1 to 5 run the requests in rows 1 and 2. `told`: (forward, row) of which findings were lost."""

    def __init__(self, events: str = "") -> None:
        self.ring, self.told = Ring(events=events), []
        self.ring.manager.lost_listeners.append(lambda lost: self.told.extend(lost))
        recorder = self.ring.manager._recorder
        self.steps = [None]
        for forward in range(1, 6):
            self.steps.append(recorder.begin_step([(1, "chat"), (2, "other")]))
            recorder.note_forward(forward, "DECODE")
            recorder.end_step()
        for forward in (1, 2, 3, 5):
            recorder.result_arrived(self.steps[forward])

    def flood(self, rows: int, forward: int, row: int = 1, reason: Reason = Reason.TOKEN) -> None:
        for _ in range(rows):
            self.ring.append(0, reason, forward=forward, row=row)

    def settle_all(self) -> None:
        for step in self.steps[1:]:
            self.ring.manager._recorder.result_arrived(step)


def test_readers_whose_findings_were_overwritten_are_told() -> None:
    """Forward 1 is known, and of forward 3 some are left. The other request has found nothing."""
    lost = _Lost()
    lost.flood(3, 1)
    lost.ring.step(1)
    lost.flood(2, 2)
    lost.flood(CAPACITY, 3)
    lost.ring.step(3)
    assert lost.told == [(2, 1), (3, 1)]
    assert lost.ring.manager.handed_over() == 3
    lost.ring.step(5)
    assert lost.told == [(2, 1), (3, 1)]


def test_a_full_ring_has_lost_nothing() -> None:
    lost = _Lost()
    lost.flood(CAPACITY, 2)
    lost.ring.step(2)
    assert (lost.told, lost.ring.manager.overwritten) == ([], 0)


@pytest.mark.parametrize("row", [gap.OUTSIDE, 2], ids=["a free's", "a draft's"])
def test_a_lost_finding_of_the_forward_before_is_not_moot(row: int) -> None:
    """A double free is found between two forwards, and has the number of the one before. Here it is the only one."""
    lost = _Lost()
    manager = lost.ring.manager
    lost.ring.step(3)
    lost.flood(1, 3, row=row, reason=Reason.DOUBLE_FREE)
    lost.flood(CAPACITY, 4)
    manager._recorder.row_released(1)
    lost.settle_all()
    lost.ring.step(5)
    assert (lost.told, manager.overwritten, manager.moot) == ([], 1, CAPACITY)


def test_what_is_left_is_judged_once_for_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 256 readers it took 13 ms of a step."""
    lost, judged = _Lost(), []
    monkeypatch.setattr(gap, "are_moot", lambda *given: judged.append(1) or are_moot(*given))
    for row in (1, 2):
        lost.flood(CAPACITY, 2, row=row)
    lost.ring.step(3)
    assert sorted(lost.told) == [(2, 1), (2, 2)]
    assert len(judged) == 1


def test_lost_findings_are_told_when_it_is_known_who_was_dead() -> None:
    """Until then nobody may take the forward for right."""
    lost = _Lost()
    manager = lost.ring.manager
    lost.ring.step(2)
    lost.flood(1, 3)
    lost.flood(1, 4)  # its result is not in
    lost.flood(CAPACITY, 5)
    lost.ring.step(5)
    assert (lost.told, manager.handed_over(), manager.busy) == ([(3, 1), (5, 1)], 3, True)
    assert manager.overwritten == 0
    manager._recorder.result_arrived(lost.steps[4])
    manager.step()
    assert (lost.told, manager.handed_over(), manager.busy) == ([(3, 1), (5, 1), (4, 1)], 5, False)
    assert manager.overwritten == 2


def test_readers_are_told_when_no_row_of_them_is_left() -> None:
    """Forward 5 is noted in the place of forward 1, so row 1 may have found something in that one, too."""
    lost = _Lost()
    manager, readers = lost.ring.manager, lost.ring.log.readers
    lost.settle_all()
    readers[1, 2], readers[1, 5 % READER_FORWARDS] = 2, 5
    rows = lost.ring.log.rows.clone()
    manager._on_rows((torch.tensor([2]), rows, torch.tensor([2 + CAPACITY]), readers), None)
    manager.step()
    assert lost.told == [(1, 1), (2, 1), (5, 1)]


@pytest.mark.parametrize("other_finds", [False, True])
@pytest.mark.parametrize("is_dead", [True, False])
def test_lost_findings_of_dead_requests_are_moot(
    is_dead: bool, other_finds: bool, tmp_path: Path
) -> None:
    """Those of a request that was alive are not, though all that is left is of a dead one."""
    path = tmp_path / "events.jsonl"
    lost = _Lost(str(path))
    manager = lost.ring.manager
    lost.flood(1, 4, row=1)
    lost.flood(int(other_finds), 4, row=2)
    lost.flood(CAPACITY, 4, row=1)
    lost.ring.step(4)
    lost.steps[4].released.update([1] * is_dead)
    lost.settle_all()
    manager.step()
    manager.finish()
    hidden = [(4, 1)] * (not is_dead) + [(4, 2)] * other_finds
    findings = 1 + other_finds
    assert lost.told == hidden
    assert manager.overwritten == (findings if hidden else 0)
    assert manager.moot == (CAPACITY * is_dead + (0 if hidden else findings))
    assert [event["findings"] for event in _told(path)] == [findings] * bool(hidden)


def test_a_request_that_is_dead_in_a_forward_was_alive_in_the_one_before() -> None:
    """The host has seen neither of them."""
    for found_before in (False, True):
        lost = _Lost()
        lost.ring.step(2)
        lost.flood(int(found_before), 3)
        lost.flood(CAPACITY + 1, 4)
        lost.steps[4].released.add(1)
        lost.settle_all()
        lost.ring.step(5)
        assert lost.told == [(3, 1)] * found_before


def test_where_the_row_of_a_reader_is_not_known_each_request_may_be_it() -> None:
    """A dead request has read nothing."""
    lost = _Lost()
    lost.flood(1, 4, row=0)
    lost.flood(CAPACITY, 4, row=1)
    lost.steps[4].released.add(1)
    lost.settle_all()
    lost.ring.step(4)
    assert (lost.told, lost.ring.manager.overwritten) == ([(4, 2)], 1)


@pytest.mark.parametrize("is_dead", [True, False])
def test_what_was_found_outside_of_forwards_is_no_requests_and_lost_all_the_same(
    is_dead: bool,
) -> None:
    """What a sweep or a free has found has the number of a forward whose findings are not known yet."""
    lost = _Lost()
    manager = lost.ring.manager
    lost.flood(1, 4, row=gap.OUTSIDE)
    lost.flood(1, 4, row=1)
    lost.flood(CAPACITY, 5, row=gap.OUTSIDE)
    lost.steps[4].released.update([1] * is_dead)
    lost.settle_all()
    lost.ring.step(5)
    assert (lost.told, manager.overwritten) == ([] if is_dead else [(4, 1)], 2)


def test_a_forward_after_which_a_sweep_finds_much_is_waited_for_by_nobody() -> None:
    lost = _Lost()
    lost.flood(CAPACITY + 1, 4, row=gap.OUTSIDE)  # the result of forward 4 is not in
    lost.ring.step(4)
    assert (lost.told, lost.ring.manager.overwritten) == ([], 1)


@pytest.mark.parametrize("left", [Reason.SWA_EVICTED_IN_WINDOW, Reason.TOKEN, None])
def test_what_is_left_of_a_row_that_was_re_pointed_stands_for_what_is_lost(
    left: Reason | None,
) -> None:
    lost = _Lost()
    lost.flood(1, 4, 2, Reason.SWA_EVICTED_IN_WINDOW)
    lost.flood(CAPACITY - 1, 4, 1)
    lost.flood(1, 4, *((1,) if left is None else (2, left)))
    lost.steps[4].released.add(1)
    lost.steps[4].rewritten.add(2)
    lost.settle_all()
    lost.ring.step(4)
    assert lost.told == ([(4, 2)] if left is Reason.TOKEN else [])


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_server_that_ends_tells_losses_of_forwards_whose_results_are_not_in(
    is_dead: bool, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    lost = _Lost(str(path))
    lost.flood(CAPACITY + 3, 4)
    lost.steps[4].released.update([1] * is_dead)
    lost.ring.step(4)
    lost.ring.manager.name_waiting(idle=True)
    assert _told(path) == []
    lost.ring.manager.finish()
    lost.ring.manager.finish()
    assert [event["findings"] for event in _told(path)] == [3] * (not is_dead)
    assert lost.ring.manager.overwritten == 3 * (not is_dead)


def test_a_listener_that_fails_keeps_no_finding_from_the_report_and_from_others() -> None:
    lost, told = _Lost(), []
    manager = lost.ring.manager

    def fail(_: object) -> None:
        raise ValueError("a listener of this test")

    manager.listeners += [fail, lambda rows: told.append(len(rows))]
    manager.lost_listeners.insert(0, fail)
    lost.flood(1, 2)
    lost.flood(CAPACITY, 3)
    with pytest.raises(ValueError, match="of this test"):
        lost.ring.step(3)
    assert (lost.told, told) == ([(2, 1), (3, 1)], [CAPACITY])
    assert not manager.busy
    manager.name_waiting(idle=True)
    assert lost.ring.reporter.distinct == 1
    manager.step()  # what is over is not told again
    assert told == [CAPACITY]


def test_floods_that_take_turns_hide_nothing() -> None:
    """Two floods of an even number of parts: what is new on a slot that is damaged already stays among the repeats."""
    ring, floods = Ring(1024), [list(range(1, 401)), list(range(501, 901))]
    for _ in range(3):
        for slots in floods:
            _flood(ring, slots, 1)
    known = ring.reporter.distinct
    for _ in range(40):
        for tag, slots in enumerate(floods):
            for place, slot in enumerate(slots):
                again = tag == 0 and place in (200, 201)
                ring.append(4 if again else 0, Reason.CONTENT, slot)
            ring.step()
            ring.manager.name_waiting(idle=True)
    assert ring.reporter.distinct == known + 2


def test_a_slot_that_was_right_until_now_is_never_left_out_of_a_flood() -> None:
    ring, slots = Ring(1024), list(range(1, 601))
    _flood(ring, slots, 4)
    for new in range(1001, 1020):
        known = ring.reporter.causes
        _flood(ring, [*slots, new], 1)
        assert ring.reporter.causes == known + 1
        _flood(ring, slots, 1)


def _read(ring: Ring, forward: int, reads: dict[str, Sequence[int]]) -> None:
    """A forward in which each request reads its damaged slots."""
    recorder = ring.manager._recorder
    step = recorder.begin_step(dict(enumerate(reads, 1)))
    recorder.note_forward(forward, "DECODE")
    recorder.end_step()
    recorder.result_arrived(step)
    for row, slots in enumerate(reads.values(), 1):
        for slot in slots:
            ring.append(0, Reason.CONTENT, slot, forward, row)
    ring.step(forward)
    ring.manager.name_waiting(idle=True)


def test_a_request_that_runs_one_step_of_a_flood_is_named() -> None:
    ring, damaged = Ring(1024), range(1, 601)
    for forward in range(1, 6):
        _read(ring, forward, {"long": damaged})
    shorts = [f"short-{i}" for i in range(20)]
    for i, short in enumerate(shorts):
        _read(ring, 6 + 2 * i, {"long": damaged, short: [10]})
        _read(ring, 7 + 2 * i, {"long": damaged})
    readers = [r for cause in ring.reporter._causes.values() for r in cause.readers]
    assert {name for _, name in readers} == {"long", *shorts}


def test_readers_that_are_known_are_left_out_of_a_flood() -> None:
    ring, damaged = Ring(1024), range(1, 601)
    for forward in range(1, 8):
        _read(ring, forward, {"long": damaged, "clean": []})
    looked_at = sum(cause.findings for cause in ring.reporter._causes.values())
    _read(ring, 8, {"long": damaged, "clean": []})
    more = sum(cause.findings for cause in ring.reporter._causes.values()) - looked_at
    assert 0 < more <= MOST_TAKEN


# Findings that no event tells


def _told(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines]
    return [event for event in events if event["event"] == "findings_lost"]


def test_overwritten_findings_are_told_at_once_and_then_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    ring = Ring(events=str(path))
    for forward in range(1, 6):
        _read(ring, forward, {"a": range(CAPACITY + forward)})
    (first,) = _told(path)
    assert (first["why"], first["findings"]) == ("overwritten", 1)
    assert (first["first_forward"], first["last_forward"]) == (1, 1)
    assert ring.reporter._losses.has_work
    monkeypatch.setattr(losses, "EVERY_S", 0.0)
    ring.manager.name_waiting(idle=True)
    _, later = _told(path)
    assert (later["findings"], later["first_forward"], later["last_forward"]) == (14, 2, 5)
    assert first["since"] <= first["time"] <= later["since"] <= later["time"]
    assert not ring.reporter._losses.has_work
    assert sum(event["findings"] for event in _told(path)) == ring.manager.overwritten


def test_what_is_lost_last_is_told_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    ring = Ring(events=str(path))
    for forward in (1, 2):
        _read(ring, forward, {"a": range(CAPACITY + 1)})
    ring.manager.finish()
    assert [event["last_forward"] for event in _told(path)] == [1, 2]


def test_dropped_findings_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(violation_reporter, "MAX_WAITING", 10)
    path = tmp_path / "events.jsonl"
    ring = Ring(events=str(path))
    _read(ring, 1, {"a": range(10)})
    assert _told(path) == []
    _read(ring, 2, {"a": range(20, 32)})
    (event,) = _told(path)
    assert (event["why"], event["findings"]) == ("dropped", 2)
    assert (event["first_forward"], event["last_forward"]) == (2, 2)


def test_a_full_ring_tells_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    ring = Ring(events=str(path))
    _read(ring, 1, {"a": range(CAPACITY)})
    ring.manager.finish()
    assert path.exists()
    assert _told(path) == []


def test_what_is_new_in_a_flood_is_taken_within_some_steps_and_then_all_of_it() -> None:
    ring, slots = Ring(1024), list(range(1, 601))
    _flood(ring, slots, 4)
    assert ring.reporter.causes == len(slots)
    parts = -(-(len(slots) + 1) // MOST_TAKEN)
    for place in (0, 302, 601):  # wherever it stands among the rows
        known, new = ring.reporter.causes, 1000 + place
        slots.insert(place, new)
        _flood(ring, slots, parts + 1)
        assert ring.reporter.causes == known + 1
    slots += range(2000, 2100)
    _flood(ring, slots, parts + 2)
    assert ring.reporter.causes == len(slots)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))


@pytest.mark.parametrize("slots", [range(1, 2), range(1, 601)], ids=["all", "a part"])
def test_findings_that_a_flood_leaves_out_are_no_evidence(slots: range) -> None:
    """One record alone is wrong, or those about the others are among what is only counted."""
    ring, is_flood = Ring(2048), len(slots) > MOST_TAKEN
    _flood(ring, slots, 8)
    while not (causes := ring.reporter.causes_about(lambda c: "TOKEN" in c.first.reasons, 1)[0]):
        for tag in (
            (0, 1, 4, 5) if is_flood else (0,)
        ):  # both halves, before the forward and after it
            ring.append(tag, Reason.TOKEN, slots[-1])
        _flood(ring, slots, 1)
    ((cause, _),) = causes
    guess = ring.reporter._story_of(cause).guess
    assert (guess.bug is BugClass.RECORDS_DAMAGED) == (not is_flood)
