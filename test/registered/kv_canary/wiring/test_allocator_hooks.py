"""Allocator events on SGLang's real allocators, through the hooks as SGLang applies them."""

from __future__ import annotations

import sys

import pytest
import torch

from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.record import State, unpack_writer
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> None:
    load_plugins()


def _rig(mode: CanaryMode, page_size: int = 1) -> ManagerRig:
    rig = ManagerRig(mode=mode, real=make_mha_pool(size=128, page_size=page_size))
    watch_allocator(rig.allocator)
    context.add(rig.manager, rig)
    return rig


@pytest.fixture
def rig() -> ManagerRig:
    return _rig(CanaryMode.LOG)


@pytest.fixture
def strict_rig() -> ManagerRig:
    return _rig(CanaryMode.RAISE)


def _state(rig: ManagerRig, slot: int) -> State:
    return State(unpack_writer(int(rig.manager.groups[0].k_head[slot, 3]))[3])


def _reasons(rig: ManagerRig) -> set[str]:
    return {reason for v in rig.settle() for reason in v.reasons}


def test_alloc_write_free_is_clean_over_and_over(strict_rig: ManagerRig) -> None:
    rig = strict_rig
    for round_ in range(6):
        rig.lengths[1] = 0
        rig.extend(1, range(round_, round_ + 100))
        rig.decode([1])
        rig.allocator.free(rig.rows.req_to_token[1, :101])
    assert rig.settle() == []


def test_a_free_takes_effect_before_the_next_forward_only(rig: ManagerRig) -> None:
    rig.extend(1, range(10))
    slot = rig.slot(1, 4)
    rig.allocator.free(torch.tensor([slot]))
    assert _state(rig, slot) is State.LIVE
    rig.decode([1])
    assert _state(rig, slot) is State.FREED
    assert _reasons(rig) == {"USE_AFTER_FREE"}


def test_the_freed_indices_are_copied_because_rows_are_rewritten(rig: ManagerRig) -> None:
    rig.extend(1, range(10))
    slots = [rig.slot(1, p) for p in range(10)]
    rig.allocator.free(rig.rows.req_to_token[1, :10])
    rig.rows.req_to_token[1, :10] = 0
    rig.lengths[1] = 0
    rig.extend(2, range(5))
    assert {_state(rig, s) for s in slots} == {State.FREED}


def test_double_free_is_reported_with_writer_and_free(rig: ManagerRig) -> None:
    rig.extend(1, range(10))
    slot = torch.tensor([rig.slot(1, 4)])
    rig.allocator.free(slot)
    rig.decode([1])
    rig.rows.req_to_token[1, 4] = 0
    rig.allocator.free(slot)
    rig.settle()
    (violation,) = [v for v in rig.reported if "DOUBLE_FREE" in v.reasons]
    assert violation.slot == int(slot)
    assert violation.writer.request_id == "req-1"
    assert violation.freed is not None


def test_twice_in_one_step_is_a_double_free_too(rig: ManagerRig) -> None:
    rig.extend(1, range(10))
    slot = torch.tensor([rig.slot(1, 9)])
    rig.allocator.free(slot)
    rig.allocator.free(slot)
    rig.extend(2, range(5))
    assert _reasons(rig) == {"DOUBLE_FREE"}


def test_a_slot_that_was_handed_out_and_given_back_unwritten_is_no_double_free(
    strict_rig: ManagerRig,
) -> None:
    rig = strict_rig
    rig.extend(1, range(10))
    rig.allocator.free(rig.rows.req_to_token[1, :10])
    for _ in range(3):
        rig.allocator.free(rig.allocator.alloc(100))
    rig.lengths[1] = 0
    rig.extend(1, range(10))
    assert rig.settle() == []


def test_reading_a_slot_that_was_handed_out_but_never_written(rig: ManagerRig) -> None:
    rig.extend(1, range(10))
    old = rig.rows.req_to_token[1, :10].long()
    rig.allocator.free(old)
    slots = rig.allocator.alloc(rig.allocator.available_size())
    rig.rows.req_to_token[2, 0] = old[0].int()
    assert int(old[0]) in slots.tolist()
    rig.lengths[2] = 1
    rig.allocator.free(slots[:1] if int(slots[0]) != int(old[0]) else slots[1:2])
    rig.decode([2])
    assert _reasons(rig) == {"UNWRITTEN_SINCE_ALLOC"}


def test_free_groups_count_once(strict_rig: ManagerRig) -> None:
    rig = strict_rig
    rig.extend(1, range(10))
    rig.allocator.free_group_begin()
    rig.allocator.free(rig.rows.req_to_token[1, :5])
    rig.allocator.free(rig.rows.req_to_token[1, 5:10])
    rig.allocator.free_group_end()
    rig.lengths[1] = 0
    rig.extend(2, range(5))
    assert rig.settle() == []


def test_clear_frees_everything(rig: ManagerRig) -> None:
    rig.extend(1, range(10))
    rig.allocator.clear()
    rig.decode([1])
    assert "USE_AFTER_FREE" in _reasons(rig)


def test_after_a_clear_new_requests_are_clean(strict_rig: ManagerRig) -> None:
    rig = strict_rig
    for _ in range(3):
        rig.lengths[1] = 0
        rig.extend(1, range(100))
        rig.decode([1])
        rig.allocator.clear()
    assert rig.settle() == []


def test_a_paged_free_gives_back_whole_pages() -> None:
    rig = _rig(CanaryMode.RAISE, page_size=16)
    slots = rig.allocator.alloc(32)
    rig.rows.req_to_token[1, :32] = slots.int()
    rig.allocator.alloc = lambda n: slots[:n]
    rig.extend(1, range(32))
    del rig.allocator.alloc
    rig.allocator.free(slots[16:20])
    rig.manager.ledger.apply()
    assert {_state(rig, int(s)) for s in slots[16:]} == {State.FREED}
    assert {_state(rig, int(s)) for s in slots[:16]} == {State.LIVE}
    assert rig.settle() == []


def _paged(rig: ManagerRig, pages: int = 1) -> torch.Tensor:
    """Slots of fresh pages, written by row 1."""
    slots = rig.allocator.alloc(16 * pages)
    rig._alloc_extend = lambda row, count: slots[:count]
    rig.result(rig.extend(1, range(16 * pages)))
    return slots


@pytest.fixture
def paged_rig() -> ManagerRig:
    return _rig(CanaryMode.LOG, page_size=16)


@pytest.mark.parametrize("first", [16, 3], ids=["same slots", "other slots of the page"])
def test_a_page_that_a_step_frees_twice(paged_rig: ManagerRig, first: int) -> None:
    rig = paged_rig
    slots = _paged(rig)
    before = rig.allocator.available_size()
    rig.allocator.free(slots[:first])
    rig.allocator.free(slots[-first:])
    assert rig.allocator.available_size() == before + 32, "the page is in the free list twice"
    assert _reasons(rig) == {"DOUBLE_FREE"}
    by_page = hasattr(rig.allocator, "_release_page_ids")  # newer releases free pages, not slots
    freed = slots[:1] if by_page else slots[-first:]
    assert {v.slot for v in rig.reported} == set(freed.tolist())


def test_pages_that_a_free_group_lists_twice_are_freed_once(paged_rig: ManagerRig) -> None:
    rig = paged_rig
    slots = _paged(rig, pages=2)
    before = rig.allocator.available_size()
    rig.allocator.free_group_begin()
    rig.allocator.free(slots[:20])
    rig.allocator.free(slots[20:])
    rig.allocator.free_group_end()
    assert rig.allocator.available_size() == before + 32
    assert rig.settle() == []


def test_pages_that_are_freed_handed_out_and_freed_within_a_step(paged_rig: ManagerRig) -> None:
    rig = paged_rig
    slots = _paged(rig, pages=2)
    rig.allocator.free(slots[:16])
    rig.allocator.free(slots[16:])
    for _ in range(3):
        pages = rig.allocator.alloc(rig.allocator.available_size())
        for page in pages.view(-1, 16):
            rig.allocator.free(page)
    assert rig.settle() == []


@pytest.mark.parametrize("is_flushed", [True, False])
def test_a_clear_gives_back_the_rows_that_sessions_keep(
    rig: ManagerRig, is_flushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rig's recorder is the target's. That of the context sees the same steps and no forward, as on a server."""
    monkeypatch.setattr(context, "recorder", FlightRecorder(steps=rig.scheduler_steps))
    rig.result(rig.extend(1, range(10)))
    if is_flushed:
        rig.allocator.clear()
    assert rig.recorder.owners() == ({} if is_flushed else {1: "req-1"})
    step = context.recorder.begin_step(((1, "the next request"),))
    rig.recorder.note_forward(rig.recorder.newest + 1, "EXTEND")
    context.recorder.end_step()
    context.recorder.result_arrived(step)
    shared = rig.recorder.other_owner(rig.recorder.newest, 1)
    assert shared == (None if is_flushed else ("req-1", 1))


def test_a_clear_before_there_is_a_target_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = _rig(CanaryMode.LOG)
    rig.extend(1, range(10))
    monkeypatch.setattr(context, "managers", [])
    rig.allocator.clear()
    assert rig.recorder.owners() == {1: "req-1"}


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_double_free_before_a_clear_of_the_same_step(page_size: int) -> None:
    rig = _rig(CanaryMode.LOG, page_size)
    slots = _paged(rig)
    rig.allocator.free(slots)
    rig.allocator.free(slots[:1])
    rig.allocator.clear()
    assert _reasons(rig) == {"DOUBLE_FREE"}
    assert {v.slot for v in rig.reported} == {int(slots[0])}


@pytest.mark.parametrize("page_size", [1, 16])
def test_frees_and_allocations_before_a_clear_of_the_same_step(page_size: int) -> None:
    rig = _rig(CanaryMode.RAISE, page_size)
    slots = _paged(rig)
    rig.allocator.free(slots)
    rig.allocator.free(rig.allocator.alloc(rig.allocator.available_size()))
    rig.allocator.clear()
    rig.lengths[1] = 0
    _paged(rig)
    assert rig.settle() == []


def test_an_unknown_allocator_class_is_refused() -> None:
    class SomeAllocator:
        pass

    with pytest.raises(CanaryStartupError, match="SomeAllocator"):
        watch_allocator(SomeAllocator())


def test_an_allocator_that_nobody_watches_is_left_alone(rig: ManagerRig) -> None:
    other = make_mha_pool(size=32).allocator
    other.free(other.alloc(4))
    assert rig.manager.ledger._events == []
    assert PoolKind.FULL in {g.kind for g in rig.manager.groups}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
