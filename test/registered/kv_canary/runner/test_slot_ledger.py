"""Events of allocators: what is launched in a step, and that merged events do what single ones do."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.kernels.triton.kernel_launcher import KernelLauncher
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.record import Column
from sglang_kv_canary.reports.slot_history import SlotHistory
from sglang_kv_canary.runner.borrowed_tensors import BorrowedTensors
from sglang_kv_canary.runner.joined_slots import MOST_SLOTS, TABLES
from sglang_kv_canary.runner.slot_ledger import SlotLedger
from sglang_kv_canary.slot_event import CallSite, SlotEventKind
from sglang_kv_canary.state import CanaryDeviceState
from sglang_kv_canary_rigs.kernel_cases import SIDES, kernel_device, make_group, make_state
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

ALLOC, FREE, CLEAR, UNFILL, LOAD = SlotEventKind
SLOTS = 24
HOST = torch.device("cpu")  # the reference works on host memory alone


def live_group(device: torch.device) -> CanaryBufferGroup:
    group = make_group(SLOTS, device=device)
    for name in SIDES:
        words = getattr(group, name)
        words[1 : SLOTS - 4, record.WORD_WRITER] = record.pack_writer(1, 1, 1, record.State.LIVE)
    return group


def records_of(group: CanaryBufferGroup) -> list[Any]:
    return [getattr(group, name).tolist() for name in SIDES]


def reported(state: CanaryDeviceState) -> list[tuple[int, int]]:
    """(reasons, slot) of all rows, in any order."""
    rows = state.violations.rows[: int(state.violations.total)]
    return sorted(map(tuple, rows[:, [Column.REASONS, Column.SLOT]].tolist()))


# The last kind is no event: what waits is applied.
KINDS = st.sampled_from([ALLOC, ALLOC, ALLOC, FREE, FREE, FREE, LOAD, UNFILL, CLEAR, None])
LISTS = st.lists(st.integers(0, SLOTS + 2), min_size=1, max_size=5, unique=True)


@pytest.mark.parametrize("backend", [reference, triton_backend], ids=["reference", "kernels"])
@pytest.mark.parametrize("page_size", [1, 4])
@settings(
    max_examples=volume(8, 60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(happened=st.lists(st.tuples(KINDS, LISTS), min_size=3, max_size=14))
def test_merged_events_do_what_single_ones_do(
    backend: ModuleType, page_size: int, happened: list[tuple[SlotEventKind | None, list[int]]]
) -> None:
    device = HOST if backend is reference else kernel_device()
    single, merged = live_group(HOST), live_group(device)
    states = make_state(HOST), make_state(device)
    history = SlotHistory(256, str(device), [])
    ledger = SlotLedger(backend, (merged,), states[1], history)
    for kind, slots in happened:
        if kind is None:
            ledger.apply()
            continue
        listed = None if kind is CLEAR else torch.tensor(slots)
        given = None if listed is None else listed.to(device)
        ledger.record(kind, PoolKind.FULL, given, page_size)
        if kind is not LOAD:
            reference.apply_slot_event(kind, listed, single, states[0], page_size)
    ledger.apply(at_once=True)
    assert records_of(merged) == records_of(single)
    assert reported(states[1]) == reported(states[0])


def test_a_step_that_evicts_is_two_launches_and_nothing_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often the allocator was called, and by whatever turns."""
    calls: list[str] = []

    def counted(of: Any, name: str, what: str) -> None:
        original = getattr(of, name)

        def call(*args: Any, **keywords: Any) -> Any:
            calls.append(what)
            return original(*args, **keywords)

        monkeypatch.setattr(of, name, call)

    counted(torch, "cat", "torch")
    counted(SlotHistory, "_copy_slots", "torch")
    counted(KernelLauncher, "__call__", "launch")
    device = kernel_device()
    history = SlotHistory(1024, str(device), [])
    ledger = SlotLedger(triton_backend, (live_group(device),), make_state(device), history)
    for turns in ([ALLOC, FREE, ALLOC], [FREE], [FREE, ALLOC, FREE, ALLOC, FREE]):
        calls.clear()
        for kind in turns:
            for first in (1, 5, 9):
                slots = torch.arange(first, first + 4, device=device)
                ledger.record(kind, PoolKind.FULL, slots, 1, 1, (4, 0, None))
        assert ledger.apply() == 1
        assert (
            calls == ["launch"] * 2
        )  # one joins the slots, also for the history, one applies them


class _Event:
    """Stands in for a CUDA event, which a CPU does not have."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


class _Queue:
    """A ledger whose joins run when `end` says so, as on a GPU. What it applies is not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._joins: list[tuple[Any, ...]] = []  # since the last event
        self._joins_before: dict[_Event, list[tuple[Any, ...]]] = {}

        def keep(borrowed: BorrowedTensors, tensors: Any, beside: Any = None) -> bool:
            event = _Event()
            self._joins_before[event], self._joins = self._joins, []
            borrowed.waiting.append((event, (tensors, beside)))
            return True

        monkeypatch.setattr(BorrowedTensors, "keep", keep)
        self.history = SlotHistory(4096, "cpu", [CallSite("", ("f",))])
        self.history._cuda = True  # a copy does not wait
        backend = SimpleNamespace(
            apply_slot_runs=lambda *_: None, join_slots=lambda *join: self._joins.append(join)
        )
        self.ledger = SlotLedger(backend, (live_group(HOST),), make_state(HOST), self.history)

    def record(self, kind: SlotEventKind, slot: int, dtype: torch.dtype = torch.int64) -> None:
        slots = torch.tensor([slot], dtype=dtype)
        self.ledger.record(kind, PoolKind.FULL, slots, 1, 1, (1, 0, f"request {slot}"))

    def free_and_hand_out(self, slot: int, dtype: torch.dtype = torch.int64) -> None:
        self.record(FREE, slot, dtype)
        self.record(ALLOC, slot, dtype)
        assert self.ledger.apply() == 1

    @property
    def events(self) -> list[_Event]:
        return [event for event, _ in self.ledger._borrowed.waiting]

    def end(self, *events: _Event) -> None:
        for event in events:
            for join in self._joins_before[event]:
                reference.join_slots(*join)
            event.is_over = True

    def known(self, slot: int) -> list[SlotEventKind]:
        return [moment.kind for moment in self.history.of(PoolKind.FULL, slot)]


def test_the_history_knows_slots_once_the_launch_that_joins_them_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = _Queue(monkeypatch)
    for slot in (3, 4, 5):
        queue.free_and_hand_out(slot)
    assert [queue.known(slot) for slot in (3, 4, 5)] == [[], [], []]
    queue.end(*queue.events[:2])
    assert [queue.known(slot) for slot in (3, 4, 5)] == [[FREE, ALLOC], [FREE, ALLOC], []]
    queue.end(*queue.events)
    assert queue.known(5) == [FREE, ALLOC]


def test_what_torch_has_copied_on_another_stream_is_known_after_the_joins_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ring lacks the join's slots until then, and has older ones in their places."""
    queue = _Queue(monkeypatch)
    queue.history.ring.fill_(9)
    queue.free_and_hand_out(3)  # joined behind a prefill's layers
    queue.record(ALLOC, 5)
    queue.history.catch_up()  # copied on the schedule stream, which has nothing else to do
    join, copy = queue.events
    queue.end(copy)
    assert [queue.known(slot) for slot in (3, 5, 9)] == [[], [], []]
    queue.end(join)
    assert [queue.known(slot) for slot in (3, 5, 9)] == [[FREE, ALLOC], [ALLOC], []]


def test_while_the_device_reads_all_tables_torch_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, joined = _Queue(monkeypatch), []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors: joined.append(len(tensors)) or cat(tensors))
    for slot in range(1, TABLES + 1):
        queue.free_and_hand_out(slot)
    assert not joined
    queue.free_and_hand_out(TABLES + 1)
    assert joined == [2]
    queue.end(queue.events[0])
    queue.free_and_hand_out(TABLES + 2)
    assert joined == [2]
    queue.free_and_hand_out(TABLES + 3)
    assert joined == [2, 2]
    assert queue.known(TABLES + 1) == queue.known(TABLES + 3) == []
    queue.end(*queue.events)
    assert all(queue.known(slot) == [FREE, ALLOC] for slot in range(1, TABLES + 4))
    assert len(queue.ledger._joins._tables) == TABLES


def test_a_join_that_fails_costs_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = _Queue(monkeypatch)

    def broken(*_: Any) -> None:
        raise RuntimeError("no launch")

    monkeypatch.setattr(queue.ledger._joins, "_join", broken)
    for _ in range(TABLES + 1):
        with pytest.raises(RuntimeError, match="no launch"):
            queue.free_and_hand_out(3)
    assert len(queue.ledger._joins._tables) == TABLES


def test_slots_that_a_table_cannot_list_are_joined_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = _Queue(monkeypatch)
    queue.free_and_hand_out(3, torch.int16)
    assert len(queue.ledger._joins._tables) == TABLES
    queue.end(*queue.events)
    assert queue.known(3) == [FREE, ALLOC]
    many = torch.arange(1, MOST_SLOTS + 2) % SLOTS
    queue.ledger.record(ALLOC, PoolKind.FULL, many, 1, 1, (len(many), 0, None))
    assert queue.ledger.apply(at_once=True) == 1
    assert len(queue.ledger._joins._tables) == TABLES


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
