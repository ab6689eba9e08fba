"""Findings become damage: each reader once, from the first position on, and memory that changes by itself twice."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import UNKNOWN, Column, Mode, Reason, State, pack_writer
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary.reports.origin import Origin
from sglang_kv_canary.runner.arrival_desk import ArrivalDesk
from sglang_kv_canary.runner.damage_desk import (
    LOST,
    MAX_CHANGES,
    Damage,
    DamageDesk,
    DamagedSlot,
    Reader,
)

register_cpu_ci(est_time=3, suite="stage-a-test-cpu")


def written(forward: int, state: State = State.LIVE) -> int:
    return pack_writer(forward, 1, Mode.EXTEND, state)


def finding(**values: int) -> np.ndarray:
    """A row of the ring. By default forward 1 reads slot 9 in row 1, whose K bytes have changed."""
    tag = CanaryLaunchTag(
        values.pop("kind", PoolKind.FULL), values.pop("half", "K"), values.pop("side", Side.TAIL)
    )
    row = np.full(len(Column), UNKNOWN, dtype=np.int64)
    known = {
        "TAG": tag.id,
        "REASONS": Reason.CONTENT,
        "SLOT": 9,
        "FULL_SLOT": 9,
        "READER_ROW": 1,
        "READER_FORWARD": 1,
        "WRITER": written(0),
        "EXPECTED_CONTENT": 77,
        **values,
    }
    for name, value in known.items():
        row[Column[name]] = int(value)
    return row


@pytest.fixture
def desk() -> DamageDesk:
    """Forwards 1, 2, ... run "ada" in row 1 and "bob" in row 2. Each computes one token, from position 40 on."""
    recorder = FlightRecorder()
    for forward in range(1, 4):
        starts = [39 + forward, 69 + forward]
        recorder.begin_step([(1, "ada"), (2, "bob")], starts=starts)
        recorder.note_forward(forward, "DECODE")
        recorder.end_step()
    return DamageDesk(recorder)


def found(desk: DamageDesk, *rows: np.ndarray) -> Damage:
    desk.note_findings(np.stack(rows))
    damage = desk.peek()
    desk.clear()
    return damage


def test_a_reader_is_named_once_with_the_first_position_computed_from_damage(desk: DamageDesk):
    again = finding(READER_FORWARD=3)
    damage = found(desk, again, finding(READER_FORWARD=2), finding(READER_FORWARD=2, half="V"))
    assert damage.readers == (Reader("ada", 1, 2, 41, ("CONTENT",)),)
    assert damage.slots == (DamagedSlot(9, written(0), changed=True),)
    assert desk.peek() == Damage()
    assert not desk.is_waiting


def test_the_same_damage_asks_for_one_action_on_its_slot(desk: DamageDesk):
    found(desk, finding())
    later = found(desk, finding(READER_FORWARD=3, READER_ROW=2))
    assert [reader.request_id for reader in later.readers] == ["bob"]
    assert later.slots == ()  # by now the slot may have another owner
    assert found(desk, finding(WRITER=written(2))).slots != ()


def test_only_changed_bytes_are_damage_to_all_who_hold_the_slot(desk: DamageDesk):
    wrong_row = finding(REASONS=Reason.CHAIN | Reason.POSITION, side=Side.HEAD)
    assert found(desk, wrong_row).slots == (DamagedSlot(9, written(0), changed=False),)
    swa = finding(kind=PoolKind.SWA, SLOT=4, FULL_SLOT=30)
    assert found(desk, swa).slots == (DamagedSlot(30, written(0), changed=False),)


@pytest.mark.parametrize("reasons", [Reason.DOUBLE_FREE, Reason.STALE_WEIGHTS], ids=str)
def test_what_is_reported_only_asks_for_nothing(reasons: Reason, desk: DamageDesk):
    assert found(desk, finding(REASONS=reasons)) == Damage()
    both = finding(REASONS=Reason.STALE_WEIGHTS | Reason.CONTENT)
    assert [reader.request_id for reader in found(desk, both).readers] == ["ada"]


def test_the_sweep_has_no_reader(desk: DamageDesk):
    damage = found(desk, finding(side=Side.SWEEP, READER_ROW=0))
    assert (damage.readers, len(damage.slots)) == ((), 1)


def test_the_sweep_drops_the_full_slots_that_are_mapped_to_a_swa_slot(desk: DamageDesk):
    """It lists SWA slots in their own space: FULL slot 9 is another one's."""
    mapping = torch.zeros(16, dtype=torch.int64)
    mapping[[5, 9, 12]] = torch.tensor([9, 3, 9])
    head, tail = torch.zeros(2, 16, 4, dtype=torch.int64)
    desk.groups = (CanaryBufferGroup(PoolKind.SWA, head, tail, swa_index_lut=mapping),)
    damage = found(desk, finding(kind=PoolKind.SWA, side=Side.SWEEP, READER_ROW=0))
    assert [slot.slot for slot in damage.slots] == [5, 12]
    assert damage.bad_memory == ()
    forward = found(desk, finding(kind=PoolKind.SWA, FULL_SLOT=7))
    assert [slot.slot for slot in forward.slots] == [7]


def test_slot_0_is_never_dropped(desk: DamageDesk):
    unmapped = finding(REASONS=Reason.UNMAPPED_SLOT, SLOT=0, FULL_SLOT=0, WRITER=0)
    damage = found(desk, unmapped)
    assert (len(damage.readers), damage.slots) == (1, ())


ARRIVAL = 4


@pytest.fixture
def receiving(desk: DamageDesk) -> DamageDesk:
    """Forward ARRIVAL checks what has arrived in row 1."""
    desk.recorder.begin_step([(1, "ada")], origins={1: Origin("prefill server", ())})
    desk.recorder.note_forward(ARRIVAL, Mode.ARRIVAL.name)
    desk.recorder.end_step()
    return desk


def test_what_arrives_wrong_is_no_bad_memory(receiving: DamageDesk) -> None:
    for content in (78, 79):
        damage = found(receiving, finding(READER_FORWARD=ARRIVAL, EXPECTED_CONTENT=content))
        assert (len(damage.readers), damage.bad_memory) == (1, ())
    assert found(receiving, finding(EXPECTED_CONTENT=80), finding()).bad_memory


def test_who_waits_for_its_arrival_has_read_nothing(receiving: DamageDesk) -> None:
    """Unless the prefix is wrong that its row has from the cache: others have it, too."""
    arrivals = ArrivalDesk(None, None, None)
    receiving.are_awaited = arrivals.are_awaited
    arrivals.await_findings(ARRIVAL, first=12, row=1)
    rows = [
        finding(READER_FORWARD=ARRIVAL, STORED_POSITION=12),
        finding(READER_FORWARD=ARRIVAL, EXPECTED_POSITION=13, STORED_POSITION=3),
        finding(READER_FORWARD=ARRIVAL),  # of the whole row
    ]
    for row in rows:
        assert found(receiving, row) == Damage()
        arrivals.note_findings(row[None])
    arrivals.note_known(ARRIVAL)
    assert arrivals.verdict(ARRIVAL) == {1}
    cached = finding(READER_FORWARD=ARRIVAL, STORED_POSITION=11)
    assert [r.request_id for r in found(receiving, cached).readers] == ["ada"]
    arrivals.forget(ARRIVAL)
    arrivals.await_findings(ARRIVAL, first=12, row=1)
    arrivals.note_findings(cached[None])
    assert arrivals.verdict(ARRIVAL) == set()


@pytest.mark.parametrize(("slot", "exists"), [(15, True), (16, False), (1_000_000, False)])
def test_only_slots_of_the_pool_are_looked_up(slot: int, exists: bool, desk: DamageDesk) -> None:
    """A finding in the SWA pool names the row's entry, whatever it is."""
    buffers = torch.zeros(4, 16, 4, dtype=torch.int64)
    desk.groups = (
        CanaryBufferGroup(PoolKind.FULL, *buffers[:2]),
        CanaryBufferGroup(PoolKind.SWA, *buffers[2:]),
    )
    reasons = Reason.TOKEN if exists else Reason.SLOT_OUT_OF_RANGE
    row = finding(kind=PoolKind.SWA, REASONS=reasons, SLOT=UNKNOWN, FULL_SLOT=slot)
    damage = found(desk, row)
    assert [each.slot for each in damage.slots] == ([slot] if exists else [])
    assert [reader.request_id for reader in damage.readers] == ["ada"]


def test_those_whose_findings_were_lost_have_read_damage(desk: DamageDesk) -> None:
    heard: list[int] = []
    desk.on_found = lambda: heard.append(1)
    desk.note_lost([(3, 1), (77, 1)])  # 77 is not on record
    assert desk.take().readers == (Reader("ada", 1, 3, 42, (LOST,)),)
    desk.note_lost([(2, 1), (2, 2), (3, 1)])
    assert [(r.request_id, r.forward) for r in desk.take().readers] == [("ada", 2), ("bob", 2)]
    assert len(heard) == 2
    desk.note_lost([(77, 1), (3, 9)])
    assert (len(heard), desk.is_waiting, desk.take()) == (2, False, Damage())


def test_a_loss_within_a_minute_of_a_log_line_is_in_the_next_one(
    desk: DamageDesk, caplog: pytest.LogCaptureFixture
) -> None:
    for forward in (1, 2, 3):
        if forward == 3:
            desk._complaints._next_log = 0.0  # a minute is over
        desk.note_lost([(forward, 1), (forward, 2)])
    desk._complaints._next_log = 0.0
    desk.note_lost([(2, 1), (2, 2)])
    said = [record.getMessage() for record in caplog.records]
    numbers = [re.findall(r"\d+", line) for line in said]
    assert numbers == [["1", "1", "1", "2"], ["2", "2", "3", "2"], ["1", "2", "2", "2"]]


def test_a_reader_has_all_reasons_of_its_forwards(desk: DamageDesk) -> None:
    """The first one alone would say that its row is right."""
    desk.note_findings(finding()[None])
    desk.note_findings(finding(READER_FORWARD=2, REASONS=Reason.CHAIN)[None])
    desk.note_lost([(3, 1), (3, 2)])
    ada, bob = desk.take().readers
    assert (ada.forward, ada.start, ada.reasons) == (1, 40, ("CONTENT", "CHAIN", LOST))
    assert (bob.forward, bob.reasons) == (3, (LOST,))


def test_an_arrival_whose_findings_were_lost_is_not_known_to_be_right(
    receiving: DamageDesk,
) -> None:
    arrivals = ArrivalDesk(None, None, None)
    receiving.awaits = arrivals.awaits
    for forward in (ARRIVAL, ARRIVAL + 1):
        arrivals.await_findings(forward, first=12, row=1)
    arrivals.note_known(ARRIVAL + 1)
    for note_lost in (arrivals.note_lost, receiving.note_lost):
        note_lost([(ARRIVAL, 1), (ARRIVAL + 1, 2), (ARRIVAL + 2, 1)])
    assert (arrivals.verdict(ARRIVAL), arrivals.has_lost(ARRIVAL)) == ({1}, True)
    assert (arrivals.verdict(ARRIVAL + 1), arrivals.has_lost(ARRIVAL + 1)) == (set(), False)
    assert not receiving.is_waiting  # its transfer fails, which is enough
    arrivals.forget(ARRIVAL)
    assert (arrivals._lost, arrivals.awaits(ARRIVAL)) == (set(), False)


@pytest.mark.parametrize(
    ("second", "is_bad"),
    [
        ({"EXPECTED_CONTENT": 78}, True),  # the bytes have changed again
        ({"WRITER": written(2)}, True),  # rewritten, and changed again
        ({"READER_FORWARD": 3}, False),  # the same change
        ({"half": "V"}, False),  # one store of a whole token changes both
        ({"SLOT": 10, "FULL_SLOT": 10, "EXPECTED_CONTENT": 78}, False),
        ({"REASONS": Reason.CONTENT | Reason.CHAIN, "EXPECTED_CONTENT": 78}, False),
        ({"WRITER": written(2) ^ 1, "EXPECTED_CONTENT": 78}, False),  # a damaged record
    ],
    ids=str,
)
def test_memory_is_bad_when_a_slot_changes_by_itself_twice(second, is_bad, desk: DamageDesk):
    assert found(desk, finding()).bad_memory == ()
    assert found(desk, finding(**second)).bad_memory == ((("FULL", 9),) if is_bad else ())


def test_a_slot_that_changes_all_the_time_fills_no_memory(desk: DamageDesk):
    for content in range(100):
        found(desk, finding(EXPECTED_CONTENT=content))
    (changes,) = desk._changes.values()
    assert len(changes) == MAX_CHANGES
    assert found(desk, finding(EXPECTED_CONTENT=100)).bad_memory == ()


def test_findings_are_put_together(desk: DamageDesk):
    mine = found(desk, finding(READER_FORWARD=2))
    ada = Reader("ada", 1, 1, 40, ("CHAIN",))
    other = Damage((ada,), (DamagedSlot(9, 5, False),), (("SWA", 3),), (31, 30))
    both = Damage.of_all([mine, other])
    assert both.readers == (replace(ada, reasons=("CONTENT", "CHAIN")),)
    assert both.slots == (*mine.slots, *other.slots)
    assert both.bad_memory == (("SWA", 3),)
    assert both.tainted == (30, 31)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
