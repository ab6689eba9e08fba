"""Findings are known from what the device publishes: without a copy, not too early, and by copies where it fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.config import Action, CanaryMode
from sglang_kv_canary.errors import CanaryViolationError
from sglang_kv_canary.plan.arrival import Arrival
from sglang_kv_canary.plan.speculation import SpeculationShape
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.record import Column
from sglang_kv_canary.reports.flight_recorder import StepRecord
from sglang_kv_canary.reports.outbox import Outbox
from sglang_kv_canary.runner.damage_desk import LOST
from sglang_kv_canary.runner.step_observer import StepObserver
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import NOT_PUBLISHED, Header
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool
from sglang_kv_canary_rigs.spec_rig import SpecRig, scratch
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")
register_cuda_ci(est_time=60, suite="stage-b-test-1-gpu-small")

SELDOM = 1e9  # seconds between copies: one is made in the first step, and others only where somebody needs them
NEVER_REACHES = "does not reach host memory"


class Copies:
    """Counts the copies of a manager. `then` is called after each."""

    def __init__(self, rig: ManagerRig, then: Callable[[], object] = lambda: None) -> None:
        self.count = 0
        start = rig.manager._copy.start

        def counted(*arguments: Any) -> bool:
            started = start(*arguments)
            if started:
                self.count += 1
                then()
            return started

        rig.manager._copy.start = counted


def _damage(rig: ManagerRig, row: int = 1, position: int = 3) -> None:
    rig.manager.groups[0].k_head[rig.slot(row, position), 1] ^= 1


@pytest.mark.parametrize("mode", CanaryMode)
def test_a_step_makes_no_copy_and_its_findings_are_known_with_its_result(mode: CanaryMode) -> None:
    rig = ManagerRig(mode=mode, copy_every_s=SELDOM)
    copies = Copies(rig)
    rig.result(rig.extend(1, range(20)))
    assert copies.count == 1  # the first
    for _ in range(10):
        rig.result(rig.decode([1]))
    assert copies.count == 1
    _damage(rig)
    step = rig.decode([1])
    if mode is CanaryMode.RAISE:
        with pytest.raises(CanaryViolationError, match="CHAIN at HEAD_K_FULL"):
            rig.result(step)
    else:
        rig.result(step)
        assert {reason for violation in rig.reported for reason in violation.reasons} == {"CHAIN"}


def test_monitors_hear_of_findings_at_once() -> None:
    """Copies are made while more is found, and again seldom afterwards."""
    rig = ManagerRig(copy_every_s=SELDOM)
    copies = Copies(rig)
    rig.result(rig.extend(1, range(20)))
    _damage(rig)
    for _ in range(2):
        rig.result(rig.decode([1]))
    assert copies.count == 3
    _damage(rig)  # as before
    rig.result(rig.decode([1]))
    before = copies.count
    for _ in range(5):
        rig.result(rig.decode([1]))
    assert copies.count == before


class _Told(StepObserver):
    """Keeps how many findings it is told of."""

    def __init__(self) -> None:
        self.found = 0

    def on_summary(self, manager: Any, summary: Any) -> None:
        self.found = summary.violations


def test_monitors_hear_of_what_the_last_copy_of_a_server_has_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The word arrives first, and the copy 8 ms sooner than the one before."""
    rig, told = ManagerRig(action=Action.ABORT, copy_every_s=0.5), _Told()
    rig.manager.observers.append(told)
    word = rig.manager.state.outbox.clone()
    rig.manager._outbox = Outbox(word)
    rig.manager._outbox.trusted = True
    now = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for waits in (0.009, 0.001):
        step = rig.extend(1, range(20))
        now += waits
        word[0] = rig.manager.state.outbox[0]
        rig.result(step)
        _damage(rig)
        now += 0.492
    rig.manager.on_idle()
    assert told.found == int(rig.manager.state.violations.total) > 0


def test_an_idle_server_copies_once_and_rests() -> None:
    rig = ManagerRig(copy_every_s=SELDOM)
    copies = Copies(rig)
    rig.result(rig.extend(1, range(20)))
    rig.result(rig.decode([1]))
    assert rig.manager.owes_copy
    for _ in range(3):
        rig.manager.on_idle()
    assert copies.count == 2
    assert not rig.manager.owes_copy


@pytest.mark.parametrize("mode", CanaryMode)
def test_where_nothing_arrives_copies_are_made_as_without_an_outbox_and_that_is_said_once(
    mode: CanaryMode, caplog: pytest.LogCaptureFixture
) -> None:
    rig = ManagerRig(mode=mode, copy_every_s=SELDOM)
    rig.lose_what_is_published()
    copies = Copies(rig)
    for row in (1, 2, 3):
        rig.result(rig.extend(row, range(20)))
    assert copies.count == (3 if mode is CanaryMode.RAISE else 1)
    assert not rig.manager.publishes
    assert caplog.text.count(NEVER_REACHES) == 1
    assert ("in each step" in caplog.text) is (mode is CanaryMode.RAISE)


def test_a_device_that_does_not_reach_host_memory_is_noticed_at_start_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = ManagerRig()
    assert rig.manager.publishes
    assert NEVER_REACHES not in caplog.text
    rig.lose_what_is_published()
    rig.manager.mark_init_finished()
    assert caplog.text.count(NEVER_REACHES) == 1


def test_words_that_do_not_arrive_any_more_are_noticed_with_copies() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    rig.result(rig.extend(1, range(20)))
    word = rig.manager.state.outbox.clone()
    rig.manager._outbox = Outbox(word)
    rig.manager._outbox.trusted = True
    for _ in range(3):
        rig.result(rig.decode([1]))
    assert not rig.manager.publishes
    for _ in range(3):
        step = rig.decode([1])
        word[0] = rig.manager.state.outbox[0]
        rig.result(step)
    assert rig.manager.publishes


def test_a_forward_that_the_host_has_not_launched_is_not_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The device counts one more: what it says of forward n is of one that the host calls n - 1."""
    rig = ManagerRig(mode=CanaryMode.RAISE, copy_every_s=SELDOM)
    rig.result(rig.extend(1, range(20)))
    rig.manager.state.summary[Header.FORWARD_DONE] += 1
    rig.result(rig.decode([1]))
    assert not rig.manager.publishes
    known = rig.manager.violations.handed_over()
    assert known <= rig.manager.forward_ct
    rig.result(rig.decode([1]))
    assert NEVER_REACHES in caplog.text
    _damage(rig)
    rig.decode([1])
    with pytest.raises(CanaryViolationError):
        rig.settle()


def test_the_steps_of_a_draft_are_known_with_the_forward_after_them() -> None:
    """Its further steps write under the same number, after the TAIL of the first one."""
    with SpecRig(SpeculationShape(topk=1, num_steps=3, draft_tokens=3)) as rig:
        rig.prefill(1, list(range(12)))
        draft = rig.draft
        before = draft.forward_ct
        rig.draft_decode([1], scratch(rig, 1))
        assert draft.forward_ct == int(draft.state.summary[Header.FORWARD_DONE]) == before + 1
        draft._outbox.take(draft.forward_ct)
        assert draft._outbox.forward == before
        tokens = [rig.bonus(1), 5]
        rig.verify([1], [[5, 6]], [-1, 0, 1])
        if hasattr(ForwardMode, "DRAFT_EXTEND"):
            rig.draft_extend([1], [tokens])
        else:  # newer releases have v2 alone
            rig.draft_extend_v2([1], [[*tokens, 6]])
        draft._outbox.take(draft.forward_ct)
        assert draft._outbox.forward == draft.forward_ct == before + 2


def test_what_has_arrived_is_known_with_all_that_its_check_finds() -> None:
    """Bytes are compared last."""
    rig = ManagerRig(copy_every_s=SELDOM)
    rig.manager.expect_arrivals(page_size=1)
    rig.result(rig.extend(1, range(20)))
    rig.pool.v_buffer[0][rig.slot(1, 7)] += 1
    forward = rig.manager.note_arrivals([Arrival(1, 0, list(range(20)), 0)])
    outbox = rig.manager._outbox
    assert outbox.take(rig.manager.forward_ct)
    assert outbox.forward == forward == 2
    assert outbox.found == int(rig.manager.state.violations.total) > 0


def test_a_copy_that_comes_late_takes_nothing_back() -> None:
    """It was started after the forward before, and comes after what this one has published."""
    rig = ManagerRig(copy_every_s=SELDOM)
    rig.extend(1, range(20))
    assert rig.manager._copy.pending is not None
    rig.decode([1])
    assert rig.manager._copy.pending is None
    assert rig.manager.has_handed_over(2)


def test_a_copy_from_another_stream_tells_of_no_forward_that_still_runs() -> None:
    """An idle server copies on the stream of its allocations, while another one checks what has arrived."""
    rig, queued = ManagerRig(copy_every_s=SELDOM), []
    rig.manager.expect_arrivals(page_size=1)
    rig.extend(1, range(20))  # the first copy is under way, so the next one waits
    rig.pool.v_buffer[0][rig.slot(1, 7)] += 1
    desk = rig.manager.arrivals
    desk.attempt = lambda *launch: queued.append(launch) or True  # the device comes to it later
    forward = rig.manager.note_arrivals([Arrival(1, 0, list(range(20)), 0)], awaited=True)
    rig.manager.on_idle()
    assert not rig.manager.owes_copy
    assert desk.verdict(forward) is None
    for launch, *arguments in queued:
        launch(*arguments)
    rig.manager.drain()
    assert desk.verdict(forward) == {1}


def _flooded(capacity: int) -> ManagerRig:
    """Rows 1 and 2 hold 20 and 40 tokens. One slot of row 1 is damaged."""
    rig = ManagerRig(copy_every_s=SELDOM, ring_capacity=capacity)
    rig.manager.expect_arrivals(page_size=1)
    rig.manager.expect_action()
    rig.result(rig.extend(1, range(20)))
    rig.result(rig.extend(2, range(40)))
    rig.settle()
    rig.pool.v_buffer[0][rig.slot(1, 7)] += 1
    return rig


@pytest.mark.parametrize(("capacity", "is_lost"), [(32, True), (1024, False)])
def test_an_arrival_whose_findings_a_flood_overwrites_is_not_taken_for_right(
    capacity: int, is_lost: bool
) -> None:
    rig, queued = _flooded(capacity), []
    desk = rig.manager.arrivals
    desk.attempt = lambda *launch: queued.append(launch) or True  # the device comes to it later
    arrivals = [Arrival(1, 0, list(range(20)), 0), Arrival(2, 0, list(range(1000, 1040)), 0)]
    first, second = (rig.manager.note_arrivals([each], awaited=True) for each in arrivals)
    for launch, *arguments in queued:
        launch(*arguments)
    rig.manager.drain()
    assert (desk.verdict(first), desk.verdict(second)) == ({1}, {2})
    assert desk.has_lost(first) is is_lost
    assert bool(rig.manager.violations.overwritten) is is_lost


@pytest.mark.parametrize(("capacity", "is_lost"), [(32, True), (1024, False)])
def test_a_reader_whose_findings_a_flood_overwrites_is_named(capacity: int, is_lost: bool) -> None:
    rig = _flooded(capacity)
    drain, rig.manager._drain = rig.manager._drain, lambda wait=False: None  # the host is late
    first = rig.decode([1])
    rig.rows.req_to_token[2, :40] = rig.rows.req_to_token[2, :40].flip(0)
    second = rig.decode([2])
    third = rig.decode([3])
    rig.manager._drain = drain
    for step in (first, second, third):
        rig.recorder.result_arrived(step)
    rig.manager.drain()
    readers = {r.request_id: r.reasons for r in rig.manager.damage.take().readers}
    assert readers.keys() == {"req-1", "req-2"}
    assert readers["req-1"] == ((LOST,) if is_lost else ("CONTENT",))
    assert (LOST in readers["req-2"]) is is_lost


def _with_a_dead_request(tokens: int) -> ManagerRig:
    """Rows 1, 2 and 3 hold `tokens`, 40 and 20 tokens. Nothing is damaged."""
    pool = make_mha_pool(size=4096, device="cpu")
    rig = ManagerRig(real=pool, context_len=1024, copy_every_s=SELDOM)
    rig.manager.expect_arrivals(page_size=1)
    rig.manager.expect_action()
    for row, count in ((1, tokens), (2, 40), (3, 20)):
        rig.result(rig.extend(row, range(count)))
    rig.settle()
    return rig


def _die(rig: ManagerRig, tokens: int) -> StepRecord:
    """The request in row 1 ends while its last forward is queued, and its row is another's. Row 2 is alive."""
    rig.rows.req_to_token[1, :tokens] = rig.allocator.alloc(tokens).int()
    step = rig.decode([1, 2])
    rig.recorder.row_released(1)
    return step


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("tokens", [100, 400])
def test_what_a_dead_request_finds_is_moot_however_much_it_is(
    tokens: int, is_damaged: bool
) -> None:
    """Nor does it hide whether its neighbour has read damage."""
    rig = _with_a_dead_request(tokens)
    if is_damaged:
        _damage(rig, row=2)
    drain, rig.manager._drain = rig.manager._drain, lambda wait=False: None  # the host is late
    step = _die(rig, tokens)
    rig.manager._drain = drain
    rig.result(step)
    rig.settle()
    readers = {r.request_id: r.reasons for r in rig.manager.damage.take().readers}
    assert readers.keys() == ({"req-2"} if is_damaged else set())
    violations, is_flood = rig.manager.violations, tokens == 400
    assert bool(violations.overwritten) is (is_flood and is_damaged)
    assert violations.moot + violations.reported + violations.overwritten >= 4 * tokens
    if is_damaged:
        assert (LOST in readers["req-2"]) is is_flood


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_a_dead_request_finds_hides_no_verdict_on_an_arrival(is_damaged: bool) -> None:
    rig = _with_a_dead_request(400)
    if is_damaged:
        rig.pool.v_buffer[0][rig.slot(3, 7)] += 1
    drain, rig.manager._drain = rig.manager._drain, lambda wait=False: None  # the host is late
    forward = rig.manager.note_arrivals([Arrival(3, 0, list(range(20)), 0)], awaited=True)
    step = _die(rig, 400)
    rig.manager._drain = drain
    rig.result(step)
    rig.settle()
    desk = rig.manager.arrivals
    assert desk.verdict(forward) == ({3} if is_damaged else set())
    assert desk.has_lost(forward) is is_damaged
    assert rig.reported == []


@pytest.mark.parametrize("times", [1, 2])
def test_a_double_free_that_no_forward_follows_is_known_on_an_idle_server(times: int) -> None:
    """A decode server settles slots before a transfer, which may never end."""
    rig = ManagerRig(copy_every_s=SELDOM)
    rig.result(rig.extend(1, range(20)))
    rig.manager.on_idle()
    for _ in range(times):
        rig.manager.ledger.record(
            SlotEventKind.FREE, PoolKind.FULL, torch.tensor([rig.slot(1, 3)]), 1
        )
    rig.manager.settle_slots()
    rig.manager.on_idle()
    reasons = [reason for violation in rig.reported for reason in violation.reasons]
    assert reasons == ["DOUBLE_FREE"] * (times - 1)


class _Counts(StepObserver):
    """Keeps the last counters."""

    def on_summary(self, manager: Any, summary: Any) -> None:
        self.last = summary


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: it has streams")
def test_a_copy_of_an_idle_server_comes_after_what_has_been_launched_between_steps() -> None:
    rig, counts = ManagerRig(device="cuda", copy_every_s=SELDOM), _Counts()
    rig.manager.expect_arrivals(page_size=1)
    rig.manager.observers.append(counts)
    rig.result(rig.extend(1, range(20)))
    rig.manager.on_idle()
    forwards = torch.cuda.Stream()
    forwards.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(forwards):
        torch.cuda._sleep(200_000_000)  # clocks: a tenth of a second
        assert rig.manager.note_arrivals([Arrival(1, 0, list(range(20)), 0)]) == 2
    rig.manager.on_idle()
    assert counts.last.forward_done == counts.last.forward_launched == 2


# Random histories

ACTS = (*["decode"] * 5, *["damage", "extend", "result"] * 2, "fail", "idle", "arrive", "pause")


class LateWords:
    """A manager whose device is late: what it publishes reaches the host when `arrive` is called, or with a copy."""

    def __init__(self, copy_every_s: float) -> None:
        self.rig = rig = ManagerRig(copy_every_s=copy_every_s, ring_capacity=4096)
        self._word = torch.full((1,), NOT_PUBLISHED, dtype=torch.int64)
        self.arrive()
        rig.manager._outbox = Outbox(self._word)
        rig.manager._outbox.trusted = True
        Copies(rig, self.arrive)
        self._steps: list[Any] = []
        self._free = list(range(1, 8))
        self._live: list[int] = []

    def arrive(self) -> None:
        self._word[0] = self.rig.manager.state.outbox[0]

    def act(self, name: str, pick: int) -> None:
        rig = self.rig
        if name == "extend" and self._free:
            self._live.append(self._free.pop())
            self._steps.append(rig.extend(self._live[-1], range(pick + 2)))
        elif name == "decode" and self._live:
            self._steps.append(rig.decode(self._live))
        elif name == "fail" and self._free:
            row = self._free[-1]
            with pytest.raises(RuntimeError, match="the model failed"):
                rig.extend(row, range(4), fail=True)
        elif name == "idle":
            self._steps.append(rig.idle())
        elif name == "damage" and self._live:
            _damage(rig, self._live[pick % len(self._live)], 1)
        elif name == "arrive":
            self.arrive()
        elif name == "result" and self._steps:
            rig.recorder.result_arrived(self._steps.pop(0))
            rig.manager.drain()
        elif name == "pause":
            rig.manager.on_idle()

    def check(self) -> None:
        """What is known of a forward is all that it has found."""
        manager = self.rig.manager
        known = manager.violations.handed_over()
        assert known <= manager.forward_ct == int(manager.state.summary[Header.FORWARD_DONE])
        total = int(manager.state.violations.total)
        rows = manager.state.violations.rows[:total]
        found = int((rows[:, Column.READER_FORWARD] <= known).sum())
        assert len(self.rig.reported) + manager.violations.moot >= found
        assert manager._outbox.forward <= manager.forward_ct


@settings(max_examples=volume(60, 300, on_gpu=15), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 9)), min_size=5, max_size=40),
    st.sampled_from([0.0, SELDOM]),
)
def test_what_is_known_of_a_forward_is_all_that_it_has_found(
    acts: list[tuple[str, int]], copy_every_s: float
) -> None:
    late = LateWords(copy_every_s)
    for act in acts:
        late.act(*act)
        late.check()
    late.arrive()
    late.rig.settle()
    late.check()
    assert late.rig.manager.violations.handed_over() == late.rig.manager.forward_ct
    assert len(late.rig.reported) == int(late.rig.manager.state.violations.total)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
