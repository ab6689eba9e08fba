"""CanaryManager on real pools: clean forwards, faults, moot reads, exceptions, RAISE, phases."""

from __future__ import annotations

import json
import sys
import weakref
from collections import deque
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import cuda_streams, record
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.errors import CanaryPhaseError, CanaryViolationError
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.kernels.layout import content_bytes_per_slot
from sglang_kv_canary.plan.arrival import Arrival
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.pool_patcher.api import attach_canary_buffers
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary.reports.slot_history import SlotHistory
from sglang_kv_canary.runner.slot_ledger import SlotLedger
from sglang_kv_canary.runner.step_observer import StepObserver
from sglang_kv_canary.single_forward_manager import Phase
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.wiring.call_site import SITES
from sglang_kv_canary_rigs.kernel_cases import make_state
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool, make_nsa_pool, make_swa_pool

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")


def _free(rig: ManagerRig, slots) -> None:
    """What the allocator hook does, and then the allocator."""
    rig.manager.ledger.record(SlotEventKind.FREE, PoolKind.FULL, slots.clone(), 1)
    rig.allocator.free(slots)


def _reasons(violations) -> set[str]:
    return {reason for v in violations for reason in v.reasons}


def test_clean_forwards_report_nothing() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    rig.extend(1, range(100, 140))
    rig.extend(2, range(100, 120))
    rig.extend(1, range(140, 150))
    for _ in range(5):
        rig.decode([1, 2])
    assert rig.settle() == []
    assert rig.manager.forward_ct == 8


def test_a_violation_names_reader_writer_and_both_forwards() -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    rig.extend(2, range(50, 70))
    rig.pool.v_buffer[1][rig.slot(1, 7)] += 1
    rig.decode([2, 1])
    (violation,) = rig.settle()
    assert (violation.tag, violation.reasons) == ("TAIL_V_FULL", ("CONTENT",))
    assert (violation.reader.request_id, violation.reader.forward) == ("req-1", 3)
    assert (violation.writer.request_id, violation.writer.forward) == ("req-1", 1)
    assert violation.stored_position == 7
    assert violation.content_written != violation.content_now


@pytest.mark.parametrize("receives", [True, False])
def test_where_kv_arrives_a_settle_applies_nothing_of_a_launched_forward(receives: bool) -> None:
    """It runs beside the forward, which is writing the slots. Elsewhere allocations wait for a free."""
    rig = ManagerRig()
    if receives:
        rig.manager.expect_arrivals(page_size=1)
    rig.result(rig.extend(1, range(20)))
    handed_out = torch.tensor([rig.slot(1, 19) + 1])
    rig.manager.ledger.record(SlotEventKind.ALLOC, PoolKind.FULL, handed_out, 1)
    rig.decode([1])
    assert bool(rig.manager.ledger.apply(at_once=True)) != receives
    assert rig.settle() == []


def test_observers_hear_of_kv_that_arrives() -> None:
    """What copies it to host memory must come after its records became this server's own."""
    rig = ManagerRig()
    rig.manager.expect_arrivals(page_size=1)
    observer, heard = StepObserver(), []
    observer.after_late_launches = heard.append
    rig.manager.observers.append(observer)
    forward = rig.manager.note_arrivals([Arrival(1, 0, range(20), 0, has_records=False)])
    assert heard == [rig.manager]
    assert forward == rig.manager.forward_ct


def _reread(rig: ManagerRig, forwards: int) -> dict[PoolKind, float]:
    """Bytes of K and V that each group re-reads in a decode of row 1, on average."""
    counters = rig.manager.state.counters
    before = counters.clone()
    for _ in range(forwards):
        rig.result(rig.decode([1]))
    found = {}
    for group in rig.manager.groups:
        tag = CanaryLaunchTag(group.kind, "K", Side.TAIL).id
        slots = int((counters - before)[tag, TagCounter.CONTENT_CHECKED])
        size = content_bytes_per_slot(group, rig.manager.config.content_mode)
        found[group.kind] = slots * size / forwards
    return found


@pytest.mark.parametrize("budget", [4096, 8192, 20000])
def test_groups_share_the_content_budget(budget: int) -> None:
    real = make_swa_pool(size=256, size_swa=200, head_num=2, head_dim=8)
    rig = ManagerRig(real=real, sliding_window_size=120, content_budget_bytes=budget)
    rig.result(rig.extend(1, range(10, 150)))
    found = _reread(rig, 40)
    assert budget / 3 < sum(found.values()) <= budget
    full, swa = found[PoolKind.FULL], found[PoolKind.SWA]
    assert full > 0 < swa
    # The same budget is all one group's where there is one group.
    alone = ManagerRig(real=make_mha_pool(size=256), content_budget_bytes=budget)
    alone.result(alone.extend(1, range(10, 150)))
    assert budget / 3 < sum(_reread(alone, 40).values()) <= budget


def test_use_after_free_names_the_free_and_the_writer() -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    _free(rig, rig.rows.req_to_token[1, 5:6].long())
    rig.decode([1])
    violations = rig.settle()
    assert _reasons(violations) == {"USE_AFTER_FREE"}
    assert {v.tag for v in violations} == {
        "HEAD_K_FULL",
        "HEAD_V_FULL",
        "TAIL_K_FULL",
        "TAIL_V_FULL",
    }
    assert all(v.freed.forward == 1 and v.writer.request_id == "req-1" for v in violations)


def test_every_group_whose_slots_an_allocator_hands_out_hears_of_its_frees() -> None:
    """NSA: the indexer's keys lie in the slots of the latent rows."""
    real = make_nsa_pool()
    groups = attach_canary_buffers(real.pool, content=False)
    state = make_state(torch.device("cpu"))
    ledger = SlotLedger(reference, groups, state)
    for group in groups:
        group.k_head[70, record.WORD_WRITER] = record.pack_writer(1, 1, 1, record.State.LIVE)
    ledger.record(SlotEventKind.FREE, PoolKind.FULL, torch.tensor([70]), 64)
    ledger.record(SlotEventKind.FREE, PoolKind.SWA, torch.tensor([71]), 64)  # of nobody's
    assert ledger.apply() == len(groups) == 2
    for group in groups:
        assert record.unpack_writer(int(group.k_head[70, record.WORD_WRITER]))[3] == 2


def test_a_freed_slot_that_is_handed_out_and_written_again_is_clean() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    rig.extend(1, range(20))
    _free(rig, rig.rows.req_to_token[1, :20].long())
    rig.lengths[1] = 0
    rig.extend(2, range(30))
    rig.decode([2])
    assert rig.settle() == []


def test_what_a_dead_request_reads_is_moot() -> None:
    """The row is given back and recycled while a forward of the dead request is in flight."""
    rig = ManagerRig(mode=CanaryMode.RAISE)
    rig.extend(1, range(20))
    rig.extend(2, range(20))
    rig.settle()
    rig.rows.req_to_token[1, 3] = rig.slot(2, 9)  # as if recycled while the forward runs
    step = rig.decode([1, 2])
    rig.recorder.row_released(1)
    rig.result(step)
    assert rig.settle() == []
    assert rig.manager.violations.moot > 0


def test_what_a_living_request_reads_in_the_same_forward_is_not_moot() -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    rig.extend(2, range(20))
    rig.settle()
    rig.rows.req_to_token[1, 3] = rig.slot(2, 9)
    step = rig.decode([1, 2])
    rig.recorder.row_released(2)
    rig.result(step)
    assert {v.reader.request_id for v in rig.settle()} == {"req-1"}


def test_a_row_that_is_released_after_its_result_is_not_moot() -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    rig.rows.req_to_token[1, 3] = 0
    step = rig.decode([1])
    rig.result(step)
    rig.recorder.row_released(1)
    assert _reasons(rig.settle()) == {"UNMAPPED_SLOT"}


def test_a_forward_that_no_step_asked_for_is_nobodys() -> None:
    recorder = FlightRecorder()
    recorder.note_forward(1, "DECODE")
    step = recorder.begin_step([(1, "ada"), (2, "bob")])
    recorder.note_forward(2, "DECODE")
    recorder.end_step()
    recorder.row_rewritten(1)
    recorder.row_released(1)
    assert recorder.is_settled(1)
    assert not recorder.is_settled(2)
    assert [recorder.request_id(forward, 1) for forward in (1, 2)] == [None, "ada"]
    assert [recorder.step_of(forward) for forward in (1, 2, 3)] == [None, step, None]
    assert (step.moot_rows, step.rewritten_rows) == ({1}, {1})
    assert [recorder.is_moot(forward, row) for forward in (1, 2, 3) for row in (1, 2)] == [
        *(False, False),  # no step
        *(True, False),
        *(False, False),  # not on record
    ]
    recorder.result_arrived(step)
    assert recorder.is_settled(2)


def test_all_runners_of_a_process_count_the_same_steps() -> None:
    target = FlightRecorder()
    draft = target.for_runner()
    steps = [runner.begin_step([]).step for runner in (target, draft, target)]
    assert steps == [1, 2, 3]
    draft.note_forward(7, "DECODE")
    assert draft.find(7).step.step == 3
    target.end_step()
    draft.note_forward(8, "DECODE")
    assert draft.find(8).step is None
    assert target.find(7) is None


def test_nothing_is_reported_before_the_result_is_in() -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    rig.settle()
    rig.rows.req_to_token[1, 3] = 0
    step = rig.decode([1])
    rig.manager.on_idle()
    assert rig.reported == []
    rig.result(step)
    assert rig.settle() != []


def test_raise_ends_with_the_report_and_the_event_is_on_disk_first(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = ManagerRig(mode=CanaryMode.RAISE, event_file=str(events))
    rig.extend(1, range(20))
    rig.manager.groups[0].k_head[rig.slot(1, 4), 1] ^= 1
    rig.decode([1])
    with pytest.raises(CanaryViolationError, match=r"CHAIN at HEAD_K_FULL.*position 4"):
        rig.settle()
    written = [json.loads(line) for line in events.read_text().splitlines()]
    assert {event["event"] for event in written} == {"violation", "cause"}
    assert written[0]["reasons"] == ["CHAIN"]


def test_without_the_outbox_a_busy_server_copies_now_and_then_and_an_idle_one_at_once() -> None:
    rig = ManagerRig(copy_every_s=1e9)
    rig.lose_what_is_published()
    rig.result(rig.extend(1, range(20)))  # the first copy
    rig.rows.req_to_token[1, 3] = 0
    for _ in range(2):
        rig.result(rig.decode([1]))
    assert rig.reported == []
    assert _reasons(rig.settle()) == {"UNMAPPED_SLOT"}


def test_while_more_is_found_each_step_copies() -> None:
    """What the ring holds is overwritten by what is found next."""
    rig = ManagerRig(copy_every_s=1e9)
    rig.lose_what_is_published()
    rig.result(rig.extend(1, range(20)))
    slot, rig.rows.req_to_token[1, 3] = rig.slot(1, 3), 0
    rig.result(rig.decode([1]))
    each_step = len(rig.settle())
    for _ in range(3):
        rig.result(rig.decode([1]))
    assert len(rig.reported) == 4 * each_step > 0
    rig.rows.req_to_token[1, 3] = slot
    rig.result(rig.decode([1]))  # nothing more, so that the next ones wait again
    rig.rows.req_to_token[1, 3] = 0
    rig.result(rig.decode([1]))
    assert len(rig.reported) == 4 * each_step
    assert rig.manager.owes_copy
    assert len(rig.settle()) == 5 * each_step
    assert not rig.manager.owes_copy


def test_without_the_outbox_a_server_that_raises_copies_after_each_step() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE, copy_every_s=1e9)
    rig.lose_what_is_published()
    rig.result(rig.extend(1, range(20)))
    rig.rows.req_to_token[1, 3] = 0
    step = rig.decode([1])
    with pytest.raises(CanaryViolationError, match="UNMAPPED_SLOT"):
        rig.result(step)


class _Told(StepObserver):
    """Counts what it is told, and may wait for it."""

    def __init__(self) -> None:
        self.count, self.waits = 0, False

    def after_forwards(self, manager: Any) -> bool:
        return self.waits

    def on_summary(self, manager: Any, summary: Any) -> None:
        self.count += 1


def test_a_server_that_raises_tells_observers_of_findings_or_when_they_wait() -> None:
    """Also where each of its steps copies. What nobody waits for is told as often as in mode `log`."""
    rig, told = ManagerRig(mode=CanaryMode.RAISE, copy_every_s=1e9), _Told()
    rig.lose_what_is_published()
    rig.manager.observers.append(told)
    rig.result(rig.extend(1, range(20)))
    assert told.count == 1  # the first copy
    for _ in range(3):
        rig.result(rig.decode([1]))
    assert told.count == 1
    told.waits = True
    rig.result(rig.decode([1]))
    assert told.count == 2
    told.waits = False
    rig.result(rig.decode([1]))
    assert told.count == 2
    rig.rows.req_to_token[1, 3] = 0
    step = rig.decode([1])
    with pytest.raises(CanaryViolationError, match="UNMAPPED_SLOT"):
        rig.result(step)
    assert told.count == 3


def test_an_exception_in_the_model_leaves_the_canary_usable() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    rig.extend(1, range(20))
    with pytest.raises(RuntimeError, match="the model failed"):
        rig.extend(2, range(10), fail=True)
    single = rig.manager._single_forwards[0]
    assert single.phase is Phase.IDLE
    rig.lengths[2] = 0
    rig.extend(2, range(10))
    rig.decode([1, 2])
    assert rig.settle() == []
    assert rig.manager.forward_ct == int(rig.manager.state.summary[0])


def test_a_forward_that_is_not_bracketed_inside_is_an_error() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    with (
        pytest.raises(CanaryPhaseError, match="was not checked"),
        rig.manager.with_ops_outside_graph(),
    ):
        pass


def test_a_doubled_phase_names_both_callers() -> None:
    rig = ManagerRig()
    single = rig.manager._single_forwards[0]
    single.pre_ops_outside_graph()
    with pytest.raises(CanaryPhaseError, match=r"test_manager\.py.*test_manager\.py"):
        single.pre_ops_outside_graph()
    assert single.phase is Phase.IDLE


@pytest.mark.parametrize("index", [-1, 1])
def test_a_single_forward_that_does_not_exist_is_an_error(index: int) -> None:
    manager = ManagerRig(mode=CanaryMode.RAISE).manager
    with (
        pytest.raises(
            CanaryPhaseError, match=f"expected a single forward from 0 to 0.*got {index}"
        ),
        manager.with_active_single_forward_manager(index),
    ):
        pass
    with (
        pytest.raises(CanaryPhaseError, match=f"got {index}"),
        manager.with_ops_outside_graph((index,)),
    ):
        pass


def test_single_forwards_follow_each_other_and_do_not_nest() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    active = rig.manager.with_active_single_forward_manager
    with active(0):
        with (
            pytest.raises(CanaryPhaseError, match="0 begins inside single forward 0"),
            active(0),
        ):
            pass
        rig.extend(1, range(20))
    with active(0):
        rig.decode([1])
    assert rig.settle() == []


def test_a_decode_without_tokens_is_an_empty_batch() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    rig.result(rig.extend(1, range(20)))
    before = rig.manager.state.counters.clone()

    def without_tokens(batch: ForwardBatch) -> None:
        batch.input_ids = batch.positions = batch.out_cache_loc = torch.zeros(0, dtype=torch.int64)

    rig.on_batch = without_tokens
    rig.result(rig.decode([1]))
    assert rig.settle() == []
    assert torch.equal(rig.manager.state.counters, before)
    assert rig.manager.forward_ct == 1


@pytest.mark.parametrize("side", [Side.HEAD, Side.TAIL])
def test_an_endpoint_launches_its_group_and_side(side: Side) -> None:
    """What it launches is what a forward launches: content is re-read with TAIL."""
    rig = ManagerRig(mode=CanaryMode.RAISE)
    rig.extend(1, range(20))
    manager, tags = rig.manager, list(product(("K", "V"), (Side.HEAD, Side.TAIL)))

    def counts(half: str, of: Side) -> torch.Tensor:
        return manager.state.counters[CanaryLaunchTag(PoolKind.FULL, half, of).id].clone()

    before = {tag: counts(*tag) for tag in tags}
    rig.decode([1])
    grown = {tag: counts(*tag) - before[tag] for tag in tags}
    plans = []
    rig.on_batch = lambda batch: plans.append(manager.plan_input.fill_from_forward_batch(batch))
    rig.decode([1])
    before = {tag: counts(*tag) for tag in tags}
    endpoint = next(e for e in manager.launcher.endpoints if e.tag.side is side)
    endpoint.launch_per_forward(manager.launcher, plans[0])
    for tag in tags:
        now = counts(*tag) - before[tag]
        if tag[1] is not side:
            assert int(now.abs().sum()) == 0
            continue
        assert int(now[TagCounter.CHECKED]) == int(grown[tag][TagCounter.CHECKED]) + 1
        assert (now[TagCounter.CONTENT_CHECKED] > 0) == (grown[tag][TagCounter.CONTENT_CHECKED] > 0)


def test_the_mode_is_what_the_scheduler_asked_for() -> None:
    """A piecewise graph hands the model a mixed batch as an EXTEND."""
    rig = ManagerRig()
    rig.extend(1, range(20))
    rig.pool.v_buffer[1][rig.slot(1, 7)] += 1
    around = rig.manager.with_ops_outside_graph
    mixed = SimpleNamespace(forward_mode=ForwardMode.MIXED)
    rig.manager.with_ops_outside_graph = partial(around, maybe_inaccurate_forward_batch=mixed)
    rig.extend(1, range(20, 24))
    (violation,) = rig.settle()
    assert (violation.reader.mode, violation.writer.mode) == ("MIXED", "EXTEND")


def test_nested_model_forwards_count_once() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    original = rig._model

    def nested(slots):
        with rig.manager.bracket_model_forward(None):
            original(slots)

    rig._model = nested
    rig.extend(1, range(20))
    rig.decode([1])
    assert rig.settle() == []
    assert rig.manager.forward_ct == 2


def test_disarmed_forwards_neither_check_nor_write() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    rig.extend(1, range(20))
    before = rig.manager.groups[0].k_head.clone()
    with rig.manager.disarmed():
        rig.rows.req_to_token[2, :5] = 0
        rig.lengths[2] = 5
        rig.decode([2])
    assert bool((rig.manager.groups[0].k_head == before).all())
    assert rig.settle() == []


def test_repeats_are_counted_not_reported_again() -> None:
    rig = ManagerRig()
    rig.extend(1, range(20))
    rig.pool.k_buffer[0][rig.slot(1, 7)] += 1
    for _ in range(4):
        rig.decode([1])
    rig.settle()
    reporter = rig.manager.violations._reporter
    assert (reporter.distinct, reporter.repeats) == (1, 3)


def test_the_ring_says_how_many_rows_were_overwritten() -> None:
    rig = ManagerRig(ring_capacity=8)
    rig.extend(1, range(40))
    rig.rows.req_to_token[1, :40] = 0
    step = rig.decode([1])
    rig.result(step)
    rig.settle()
    assert rig.manager.violations.overwritten == 4 * 40 - 8
    assert len(rig.reported) == 8


def test_the_ring_is_copied_while_kernels_append_to_it() -> None:
    """Rows that were not there when the copy began are left for the next one, whatever lies in their places."""
    rig = ManagerRig()
    rig.extend(1, range(20))
    rig.manager.groups[0].k_head[rig.slot(1, 4), 1] ^= 1
    rig.result(rig.decode([1]))
    ring, violations = rig.manager.state.violations, rig.manager.violations
    rig.settle()
    total, rows, known = ring.total.clone(), ring.rows.clone(), len(rig.reported)
    rig.manager.groups[0].k_head[rig.slot(1, 9), 1] ^= 1
    rig.decode([1])
    assert ring.total > total
    violations._on_rows((total, rows, ring.total, ring.readers), None)
    assert violations.busy
    found = rig.settle()[known:]
    assert {v.expected_position for v in found} >= {9, 10}
    assert all(v.reasons == ("CHAIN",) for v in found)
    assert violations.overwritten == 0


class _CudaSlots(torch.Tensor):
    """Slots that say they are on a GPU; there is none to build real ones on."""

    @property
    def is_cuda(self) -> bool:
        return True


class _StreamEvent:
    """A CUDA event of a stream that the test lets run."""

    has_run = False

    def query(self) -> bool:
        return _StreamEvent.has_run


@pytest.mark.parametrize("count", [1, 3])
def test_slots_of_events_stay_allocated_until_they_are_read(count: int, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _StreamEvent)
    monkeypatch.setattr(cuda_streams, "record", lambda *_: None)
    monkeypatch.setattr(_StreamEvent, "has_run", False)
    groups = (SimpleNamespace(allocator_kind=PoolKind.FULL),)
    ledger = _ledger(deque(maxlen=0), groups)  # keeps none of them alive
    freed = [torch.tensor([i, i + 1]).as_subclass(_CudaSlots) for i in range(count)]
    alive = [weakref.ref(slots) for slots in freed]
    for slots in freed:
        ledger.record(SlotEventKind.FREE, PoolKind.FULL, slots, 1)
    del freed, slots
    assert ledger.apply() == 1
    ledger.apply()
    assert all(slots() is not None for slots in alive)
    _StreamEvent.has_run = True
    ledger.apply()
    assert [slots() for slots in alive] == [None] * count


def test_the_runs_of_a_step_have_their_own_slots() -> None:
    """The slots of all events are joined at once, with those of loads, which change no record."""
    launched: list[tuple] = []
    groups = tuple(SimpleNamespace(allocator_kind=k) for k in (PoolKind.FULL, PoolKind.SWA))
    history = SlotHistory(64, "cpu", SITES)
    ledger = _ledger(launched, groups, history)
    free, alloc, load = SlotEventKind.FREE, SlotEventKind.ALLOC, SlotEventKind.LOAD
    full, swa = PoolKind.FULL, PoolKind.SWA
    happened = [
        (free, full, [1, 2]),
        (free, swa, [9]),
        (free, full, [3]),
        (load, full, [4]),
        (free, full, [5]),
        (alloc, full, [6, 7]),
        (alloc, swa, [8]),
        (alloc, full, [10]),
    ]
    for step, (kind, pool, slots) in enumerate(happened):
        ledger.record(kind, pool, torch.tensor(slots), 1, step, (len(slots), 0, None))
    assert ledger.apply() == 3
    assert [
        (runs, slots.tolist(), group.allocator_kind) for runs, slots, group, *_ in launched
    ] == [
        ([(free, 3)], [1, 2, 3], full),
        ([(free, 1), (alloc, 3)], [5, 6, 7, 10], full),
        ([(free, 1), (alloc, 1)], [9, 8], swa),
    ]
    for step, (kind, pool, slots) in enumerate(happened):
        for slot in slots:
            (moment,) = history.of(pool, slot)
            assert (moment.kind, moment.step, moment.slots) == (kind, step, len(slots))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", [SlotEventKind.FREE, SlotEventKind.ALLOC], ids=lambda k: k.name)
def test_events_of_several_calls_become_one_launch(kind: SlotEventKind, page_size: int) -> None:
    """Only where frees give back whole pages does it matter which call listed a slot."""
    launched: list[tuple] = []
    groups = (SimpleNamespace(allocator_kind=PoolKind.FULL),)
    ledger = _ledger(launched, groups)
    for first in (8, 16, 24):
        ledger.record(kind, PoolKind.FULL, torch.arange(first, first + 2), page_size)
    ledger.record(SlotEventKind.CLEAR, PoolKind.FULL, None, page_size)
    assert ledger.apply() == 2
    (runs, slots, group, _, size, call_ids), clear = launched
    assert (runs, group, size) == ([(kind, 6)], groups[0], page_size)
    assert slots.tolist() == [8, 9, 16, 17, 24, 25]
    if page_size > 1:
        assert call_ids.tolist() == [0, 0, 1, 1, 2, 2]
    else:
        assert call_ids is None
    assert clear[:2] == (SlotEventKind.CLEAR, None)
    assert ledger.apply() == 0


def _ledger(
    launched: list[tuple] | deque[tuple], groups: tuple, history: SlotHistory | None = None
) -> SlotLedger:
    """Whose launches, but for the join of slots, are noted in `launched` and not run."""
    backend = SimpleNamespace(
        apply_slot_event=lambda *launch: launched.append(launch),
        apply_slot_runs=lambda *launch: launched.append(launch),
        join_slots=reference.join_slots,
    )
    return SlotLedger(backend, groups, make_state(torch.device("cpu")), history)


def test_calls_are_numbered_anew_in_each_run() -> None:
    launched: list[tuple] = []
    ledger = _ledger(launched, (SimpleNamespace(allocator_kind=PoolKind.FULL),))
    free, alloc = SlotEventKind.FREE, SlotEventKind.ALLOC
    for kind, slots in ((free, [4]), (free, [8, 9]), (alloc, [4]), (free, [12]), (free, [4])):
        ledger.record(kind, PoolKind.FULL, torch.tensor(slots), 4)
    assert ledger.apply() == 1
    ((runs, slots, _, _, _, call_ids),) = launched
    assert runs == [(free, 3), (alloc, 1), (free, 2)]
    assert slots.tolist() == [4, 8, 9, 4, 12, 4]
    assert call_ids.tolist() == [0, 1, 1, 0, 0, 1]


def test_after_a_loss_nothing_is_due_until_every_pool_has_come_back() -> None:
    launched: list[tuple] = []
    groups = tuple(SimpleNamespace(allocator_kind=k) for k in (PoolKind.FULL, PoolKind.SWA))
    ledger = _ledger(launched, groups)
    slots = torch.tensor([1, 2])
    ledger.record(SlotEventKind.FREE, PoolKind.FULL, slots, 1)
    assert (ledger.due, ledger.complete) == (True, True)
    ledger.forget()
    ledger.record(SlotEventKind.FREE, PoolKind.FULL, slots, 1)  # might be a second free
    ledger.record(SlotEventKind.CLEAR, PoolKind.FULL, None, 1)
    ledger.record(SlotEventKind.FREE, PoolKind.FULL, slots, 1)
    assert (ledger.due, ledger.complete, ledger.apply()) == (False, False, 0)
    ledger.record(SlotEventKind.CLEAR, PoolKind.SWA, None, 1)
    assert (ledger.due, ledger.complete, ledger.apply()) == (True, True, 3)
    kinds = [(launch[0], launch[2].allocator_kind) for launch in launched]
    assert kinds == [
        (SlotEventKind.CLEAR, PoolKind.FULL),
        ([(SlotEventKind.FREE, 2)], PoolKind.FULL),
        (SlotEventKind.CLEAR, PoolKind.SWA),
    ]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
