"""What is bounded stays bounded, and what a bound cuts off is counted and never becomes a false alarm."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.capacities import MOST_REQUESTS, CanaryLaunchCapacities
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.monitors.health import HealthCheck
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import Column, Reason
from sglang_kv_canary.reports.flight_recorder import FlightRecorder, Steps
from sglang_kv_canary.runner.slot_ledger import MAX_WAITING_ALLOCS
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import Header, TagCounter
from sglang_kv_canary_rigs.backends import Backend, available_backends
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.scene import CheckScene, assert_clean
from sglang_kv_canary_rigs.world import WorldSpec

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

WRAP = 1 << 32  # records keep 32 bits of a forward's number


# Batches


def test_more_requests_than_the_kernels_take_are_refused_with_the_number() -> None:
    sizes = {"request_rows": 8, "context_len": 8, "ring_capacity": 8}
    budgets = {"verify_budget_slots": 8, "content_budget_bytes": 8}
    sized = partial(CanaryLaunchCapacities.from_args, **sizes, **budgets)
    assert sized(max_running_requests=MOST_REQUESTS).max_batch_size == MOST_REQUESTS
    with pytest.raises(CanaryStartupError, match=r"up to 16,385 requests, .* take 16,384"):
        sized(max_running_requests=MOST_REQUESTS + 1)


# Slot events


def _alloc(rig: ManagerRig, slot: int) -> None:
    rig.manager.ledger.record(SlotEventKind.ALLOC, PoolKind.FULL, torch.tensor([slot]), 1)


def test_allocations_wait_for_a_free_up_to_a_bound() -> None:
    """A server that never frees hands out slots at each step; what waits is launched now and then."""
    ledger, launches = (rig := ManagerRig()).manager.ledger, 0
    for i in range(3 * MAX_WAITING_ALLOCS):
        _alloc(rig, 1 + i % 100)
        launches += ledger.apply()
        assert len(ledger._events) < MAX_WAITING_ALLOCS
    assert launches == 3


def test_allocations_below_the_bound_launch_nothing() -> None:
    rig = ManagerRig()
    for i in range(MAX_WAITING_ALLOCS - 1):
        _alloc(rig, 1 + i)
    assert rig.manager.ledger.apply() == 0
    rig.manager.ledger.record(SlotEventKind.FREE, PoolKind.FULL, torch.tensor([200]), 1)
    assert rig.manager.ledger.apply() == 1  # the allocations first, in one launch


# Forwards that reports can name


def test_the_recorder_remembers_the_newest_forwards() -> None:
    recorder = FlightRecorder(max_forwards=4)
    for forward in range(1, 100):
        recorder.note_forward(forward, "DECODE")
        assert len(recorder._forwards) <= 4
    assert [f for f in range(1, 101) if recorder.find(f)] == [96, 97, 98, 99]


def test_a_number_that_is_given_out_again_is_remembered_as_long_as_others() -> None:
    recorder = FlightRecorder(max_forwards=4)
    for forward in (1, 2, 2, 3, 4, 5):  # the first 2 was abandoned
        recorder.note_forward(forward, "DECODE")
    assert [f for f in range(1, 7) if recorder.find(f)] == [2, 3, 4, 5]


def test_a_report_of_a_forgotten_writer_has_its_number_and_no_name() -> None:
    rig = ManagerRig()
    rig.recorder._max_forwards = 3
    rig.result(rig.extend(1, range(20)))
    for _ in range(4):
        rig.result(rig.decode([1]))
    rig.manager.groups[0].k_head[rig.slot(1, 4), 1] ^= 1
    rig.result(rig.decode([1]))
    found = rig.settle()
    assert {v.reader.request_id for v in found} == {"req-1"}
    assert {(v.writer.forward, v.writer.request_id) for v in found} == {(1, None)}


# The violation ring, overtaken while it is copied


def _overtaken(rig: ManagerRig) -> tuple[torch.Tensor, ...]:
    """A copy of a full ring (total, rows, total, readers), whose first half was overwritten before the copy's end."""
    ring = rig.manager.state.violations
    rig.lose_what_is_published()  # else the manager would have taken the rows
    rig.result(rig.extend(1, range(20)))
    rig.manager.groups[0].k_head[rig.slot(1, 4), 1] ^= 1
    rig.decode([1])
    total = ring.total.clone()
    assert 0 < int(total) <= ring.capacity
    return total, ring.rows.clone(), total + ring.capacity - int(total) // 2, ring.readers.clone()


def test_rows_that_may_have_been_overwritten_during_their_copy_are_counted_not_reported() -> None:
    """The copy may hold such a row half old, half new, under its old number."""
    rig = ManagerRig(content=ContentMode.NONE)
    total, rows, later, readers = _overtaken(rig)
    lost = int(later) - rows.shape[0]
    assert lost == 1
    rows[0, Column.REASONS] = int(Reason.DOUBLE_FREE)  # of the row that is being written
    rig.manager.violations._on_rows((total, rows, later, readers), None)
    rig.manager.violations._fetched = rig.manager.violations._seen_total  # no further copy
    assert {reason for v in rig.settle() for reason in v.reasons} == {"CHAIN"}
    assert len(rig.reported) == int(total) - lost
    assert rig.manager.violations.overwritten == lost


def test_a_row_whose_number_is_given_out_and_that_is_not_written_yet_is_no_finding() -> None:
    rig = ManagerRig(content=ContentMode.NONE)
    total, rows, _, readers = _overtaken(rig)
    rig.manager.violations._on_rows((total + 1, rows, total + 1, readers), None)
    rig.manager.violations._fetched = rig.manager.violations._seen_total
    assert len(rig.settle()) == int(total)
    assert rig.manager.violations.overwritten == 1


# The forward counter passes 2^32


@pytest.mark.parametrize("backend", available_backends(), ids=lambda b: b.name)
def test_kernels_pass_the_wrap(backend: Backend) -> None:
    """What TAIL and content take for this forward's own records is told by 32 bits of its number."""
    scene = CheckScene(WorldSpec(swa_slots=48, window=4), backend)
    scene.state.summary[Header.FORWARD_DONE] = WRAP - 2
    for token in range(5):
        assert_clean(scene.prefill(1, [5, 6, 7]) if token == 0 else scene.decode(1))
    assert int(scene.state.summary[Header.FORWARD_DONE]) == WRAP + 3
    written = scene.full.group.k_tail[scene.slot(1, 6)]
    assert record.unpack_writer(int(written[record.WORD_WRITER]))[0] == 3
    assert int(written[record.WORD_CONTENT]) != 0


def _about_to_wrap(**settings: Any) -> ManagerRig:
    rig = ManagerRig(**settings)
    rig.manager.state.summary[Header.FORWARD_DONE] = rig.manager.forward_ct = WRAP - 2
    return rig


def test_forwards_that_pass_the_wrap_are_clean() -> None:
    rig = _about_to_wrap(mode=CanaryMode.RAISE)
    rig.extend(1, range(20))
    for _ in range(5):
        rig.decode([1])
    assert rig.settle() == []
    assert rig.manager.forward_ct == WRAP + 4


def test_writers_on_both_sides_of_the_wrap_are_named() -> None:
    rig = _about_to_wrap()
    rig.extend(1, range(20))
    for _ in range(4):
        rig.decode([1])
    for position in (4, 22):
        rig.pool.v_buffer[1][rig.slot(1, position)] += 1
    rig.decode([1])
    before, after = sorted(rig.settle(), key=lambda v: v.stored_position)
    assert (before.writer.forward, before.writer.request_id) == (WRAP - 1, "req-1")
    assert (after.writer.forward, after.writer.request_id) == (WRAP + 2, "req-1")
    assert after.reader.forward == WRAP + 4


def test_a_number_without_a_forward_stays_what_it_is() -> None:
    recorder = FlightRecorder()
    assert recorder.whole_number(7) == 7  # nothing was launched
    recorder.note_forward(5, "DECODE")
    assert recorder.whole_number(5) == 5
    assert recorder.whole_number(7) == 7  # of a damaged record: no forward has come that far


# Forwards that are abandoned


def _health(rig: ManagerRig) -> HealthCheck:
    manager = rig.manager
    health = HealthCheck(manager.config, manager.groups, manager.sink)
    manager.observers.append(health)
    return health


def _abandon(rig: ManagerRig, times: int) -> None:
    for _ in range(times):
        rig.lengths[2] = 0
        with pytest.raises(RuntimeError, match="the model failed"):
            rig.extend(2, range(10), fail=True)


def test_abandoned_forwards_are_not_taken_for_lost_checks() -> None:
    """HEAD of each ran and TAIL did not."""
    rig = ManagerRig(health_check_interval=4)
    health = _health(rig)
    rig.result(rig.extend(1, range(20)))
    for _ in range(4):
        _abandon(rig, 3)
        for _ in range(4):
            rig.result(rig.decode([1]))
    assert health.checks > 1
    assert (health.healthy, health.failures) == (True, 0)
    assert rig.manager.abandoned_ct == 12
    assert rig.settle() == []


def test_lost_checks_beside_abandoned_forwards_are_found(caplog: Any) -> None:
    rig = ManagerRig(health_check_interval=8)
    health = _health(rig)
    rig.result(rig.extend(1, range(20)))
    _abandon(rig, 1)
    for _ in range(6):
        rig.result(rig.decode([1]))
    tails = [CanaryLaunchTag(PoolKind.FULL, half, Side.TAIL).id for half in ("K", "V")]
    rig.manager.state.counters[tails, TagCounter.LAUNCHES] -= 3  # as if they had not run
    for _ in range(2):
        rig.result(rig.decode([1]))
    assert not health.healthy
    assert "TAIL of FULL ran" in caplog.text


def test_an_abandoned_forwards_number_is_given_out_again() -> None:
    rig = ManagerRig()
    rig.result(rig.extend(1, range(20)))
    _abandon(rig, 2)
    assert rig.manager.forward_ct == int(rig.manager.state.summary[Header.FORWARD_DONE]) == 1
    rig.result(rig.decode([1]))
    rig.manager.groups[0].k_head[rig.slot(1, 4), 1] ^= 1
    rig.result(rig.decode([1]))
    assert {v.reader.request_id for v in rig.settle()} == {"req-1"}
    assert {v.reader.forward for v in rig.reported} == {3}


def test_arrivals_whose_requests_end_at_once_are_not_counted_for_ever() -> None:
    """With requests of one token a row is given back right after its check. Each result looks at those that count."""
    steps = Steps()
    recorder = FlightRecorder(steps=steps)
    for _ in range(100):
        step = recorder.begin_step([(1, "a")], origins={})
        recorder.end_step()
        step.is_complete = lambda: True
        recorder.row_released(1)
    assert (len(steps.in_flight), steps.without_result) == (0, 0)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
