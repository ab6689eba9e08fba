"""Sweep lists, allocator events and moved records: the Triton kernels do exactly what the NumPy reference does."""

import sys

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary import free_marks, record
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.kernels.triton import slots as slot_launches
from sglang_kv_canary.plan.plan_input import SweepVerifyPlan
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import PREV_ANCHOR, PREV_UNREACHABLE, Reason
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary_rigs.kernel_cases import (
    Pool,
    Twin,
    kernel_device,
    make_group,
    make_state,
    ring_rows,
)

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")
register_cuda_ci(est_time=60, suite="stage-b-test-1-gpu-small")

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

SLOTS = 4000
SWEEP_K = CanaryLaunchTag(PoolKind.FULL, "K", Side.SWEEP)
ALLOC, FREE, CLEAR, UNFILL, _ = SlotEventKind  # the last one changes no record


def make_twin(halves: str = "KV") -> tuple[Twin, Pool]:
    """A twin with records of 900 slots of row 1 and 3 of row 2."""
    twin = Twin(make_group(SLOTS, halves=halves), make_state())
    pool = Pool(kernel_device(), SLOTS, 2048, 8)
    plan = pool.extend({1: 900, 2: 3})
    for side in (Side.HEAD, Side.TAIL):
        twin.check_and_write(plan, side)
    return twin, pool


@pytest.mark.parametrize("halves", ["K", "KV"])
def test_the_reference_works_on_copies_where_tensors_are_on_a_gpu(halves: str) -> None:
    """Copies of the CPU's own tensors here: what is written to them must come back, also through views."""
    twin, pool = make_twin(halves)
    twin.copies_for_reference = True
    slots = row_of(pool, 1, 40)
    twin.apply_slot_event(FREE, slots[:7])
    twin.apply_slot_event(FREE, slots[5:9])
    twin.check_and_write(pool.decode([1, 2]), Side.HEAD)
    assert twin.assert_equal() > 2


def row_of(pool: Pool, row: int, count: int) -> torch.Tensor:
    return pool.req_to_token[row, :count].long()


def sweep_plan(twin: Twin, pool: Pool, row: int, count: int) -> SweepVerifyPlan:
    slots = row_of(pool, row, count)
    prev = torch.cat([torch.full_like(slots[:1], PREV_ANCHOR), slots[:-1]])
    anchors = twin.state.anchors[row].expand(count).clone()
    return SweepVerifyPlan(slots, torch.arange(count, device=slots.device), prev, anchors)


def flip(twin: Twin, name: str, slot: torch.Tensor, word: int) -> None:
    for group in (twin.group, twin.kernel_group):
        getattr(group, name)[int(slot), word] ^= 1 << 40


@pytest.mark.parametrize("halves", ["KV", "K"])
def test_sweep_list(halves: str):
    twin, pool = make_twin(halves)
    plan = sweep_plan(twin, pool, 1, 900)
    twin.check_list(plan)
    assert twin.assert_equal() == 0
    assert int(twin.kernel_state.counters[SWEEP_K.id, TagCounter.CHECKED]) == 900
    names = [name for name in ("k_head", "k_tail", "v_head", "v_tail") if name[0].upper() in halves]
    # the next slot, whose predecessor this is, lies in the kernel's next block
    flip(twin, names[-1], plan.slots[255], record.WORD_CHAIN)
    twin.check_list(plan)
    assert twin.assert_equal() == 2
    for i, name in enumerate(names):
        for word in (record.WORD_IDENTITY, record.WORD_CHAIN, record.WORD_WRITER):
            flip(twin, name, plan.slots[40 * i + 9 * word], word)
    twin.check_list(plan)
    assert twin.assert_equal() >= 3 * len(names)


def test_sweep_list_of_odd_entries():
    twin, pool = make_twin()
    plan = sweep_plan(twin, pool, 1, 300)
    plan.slots[[3, 50]] = 0
    plan.slots[7], plan.slots[8] = -2, SLOTS
    plan.prev_slots[20:24] = torch.tensor([0, SLOTS + 1, PREV_UNREACHABLE, -9])
    plan.prev_slots[30] = plan.slots[31]
    plan.prev_slots[40] = PREV_ANCHOR
    plan.positions[60] += 1
    word = record.pack_writer(1, 0, 1, record.State.FREED)
    twin.poke("v_tail", int(plan.slots[70]), record.WORD_WRITER, word)
    twin.check_list(plan)
    assert twin.assert_equal() > 0
    no_anchors = SweepVerifyPlan(plan.slots, plan.positions, plan.prev_slots, None)
    twin.check_list(no_anchors)
    twin.assert_equal()
    twin.check_list(SweepVerifyPlan(*(t[:0] for t in (plan.slots, plan.positions, plan.slots))))
    twin.assert_equal()


def test_sweep_unarmed():
    twin, pool = make_twin()
    plan = sweep_plan(twin, pool, 1, 30)
    flip(twin, "k_head", plan.slots[3], record.WORD_CHAIN)
    for state in (twin.state, twin.kernel_state):
        state.set_armed(False)
    twin.check_list(plan)
    assert twin.assert_equal() == 0


@pytest.mark.parametrize("small", [True, False], ids=["one program", "two launches"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_events_of_single_slots(small: bool, dtype: torch.dtype, monkeypatch):
    if not small:
        monkeypatch.setattr(slot_launches, "ONE_PROGRAM_SLOTS", 1)
    twin, pool = make_twin()
    slots = row_of(pool, 1, 900)
    odd = torch.tensor([0, -3, SLOTS, SLOTS + 7], device=slots.device)

    def event(kind: SlotEventKind, listed: torch.Tensor | None) -> int:
        twin.apply_slot_event(kind, None if listed is None else listed.to(dtype))
        return twin.assert_equal()

    assert event(FREE, torch.cat([slots[:300], odd])) == 0
    assert event(FREE, torch.cat([slots[300:310], slots[302:304], slots[305:306].expand(4)])) == 6
    assert event(FREE, slots[290:320]) == 6 + 20
    assert event(ALLOC, torch.cat([slots[100:400], slots[100:120], odd])) == 26
    assert event(FREE, slots[100:200]) == 26, "handed out, then freed unwritten"
    assert event(UNFILL, slots[400:450]) == 26
    assert event(FREE, slots[440:460]) == 26
    assert event(FREE, slots[440:441]) == 27
    assert event(FREE, slots[:0]) == 27
    assert event(CLEAR, None) == 27
    assert event(ALLOC, slots) == 27


@pytest.mark.parametrize("small", [True, False], ids=["one program", "two launches"])
def test_free_of_pages(small: bool, monkeypatch):
    if not small:
        monkeypatch.setattr(slot_launches, "ONE_PROGRAM_SLOTS", 1)
    twin, _ = make_twin()
    pages = torch.arange(5, 60, device=kernel_device())
    slots = (pages[:, None] * 16 + torch.arange(16, device=pages.device)).flatten()
    for group in (twin.group, twin.kernel_group):
        word = record.pack_writer(1, 1, 1, record.State.LIVE)
        for name in ("k_head", "k_tail", "v_head", "v_tail"):
            getattr(group, name)[slots, record.WORD_WRITER] = word
    twin.apply_slot_event(FREE, slots[:400], page_size=16)  # all slots of each page
    assert twin.assert_equal() == 0
    twin.apply_slot_event(
        FREE, slots[400::7], page_size=16
    )  # some slots of each page, out of order
    assert twin.assert_equal() == 0
    twin.apply_slot_event(FREE, slots[32:48], page_size=16)
    assert twin.assert_equal() == 16
    twin.apply_slot_event(FREE, torch.tensor([SLOTS - 1], device=slots.device), page_size=48)
    twin.assert_equal()


@pytest.mark.parametrize("small", [True, False], ids=["one program", "three launches"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_pages_that_several_calls_free(small: bool, dtype: torch.dtype, monkeypatch):
    if not small:
        monkeypatch.setattr(slot_launches, "ONE_PROGRAM_SLOTS", 1)
    twin, pool = make_twin()
    slots = row_of(pool, 1, 900).to(dtype)
    odd = torch.tensor([0, -3, SLOTS, SLOTS + 7], device=slots.device, dtype=dtype)
    generator = torch.Generator().manual_seed(4)
    for round_ in range(3):
        order = torch.randperm(900, generator=generator).to(slots.device)
        listed = torch.cat([slots[order[:500]], odd, slots[order[:90]]])
        calls = torch.arange(listed.shape[0], device=slots.device, dtype=torch.int32) // 70
        twin.apply_slot_event(FREE, listed, page_size=16, call_ids=calls)
        rows = twin.assert_equal()
        assert rows > 90 * (round_ + 1)
        twin.apply_slot_event(ALLOC, slots)
        assert twin.assert_equal() == rows
    whole = torch.arange(48, device=slots.device)  # the last page alone is in both calls
    calls = (torch.arange(64, device=slots.device) >= 48).int()
    for group in (twin.group, twin.kernel_group):
        word = record.pack_writer(1, 1, 1, record.State.LIVE)
        for name in ("k_head", "k_tail", "v_head", "v_tail"):
            getattr(group, name)[16:64, record.WORD_WRITER] = word
    listed = 16 + torch.cat([whole, whole[32:]])
    twin.apply_slot_event(FREE, listed, page_size=16, call_ids=calls)
    assert twin.assert_equal() == rows + 16


def runs_of(*runs: tuple[SlotEventKind, torch.Tensor]) -> tuple[list, torch.Tensor]:
    return [(kind, len(slots)) for kind, slots in runs], torch.cat([slots for _, slots in runs])


def test_runs_are_one_launch_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    launch = slot_launches._launch_runs
    monkeypatch.setattr(
        slot_launches, "_launch_runs", lambda *call: (launches.append(1), launch(*call))
    )
    twin, pool = make_twin()
    slots = row_of(pool, 1, 900)

    def apply(*runs: tuple[SlotEventKind, torch.Tensor]) -> tuple[int, int]:
        """(launches, double frees)."""
        launches.clear()
        known = twin.assert_equal()
        twin.apply_slot_runs(*runs_of(*runs))
        return len(launches), twin.assert_equal() - known

    assert apply((FREE, slots[:300]), (ALLOC, slots[:300]), (FREE, slots[:300])) == (1, 0)
    assert apply((ALLOC, slots[:300]), (FREE, slots[:300]), (FREE, slots[290:310])) == (1, 10)
    assert apply((FREE, slots[:5]), (ALLOC, slots[:600]), (FREE, slots[:5])) == (1, 5)
    assert apply((ALLOC, slots[:5])) == (1, 0)
    assert apply((FREE, slots[400:402]), (FREE, slots[400:403]), (FREE, slots[402:404])) == (1, 3)
    many = [(kind, slots[500:510]) for kind in (FREE, ALLOC)] * 4
    assert apply(*many) == (2, 0)
    assert apply((ALLOC, slots), (FREE, slots), (ALLOC, slots)) == (2, 0)
    assert apply((FREE, slots[:0])) == (0, 0)


def test_a_run_that_is_too_long_for_a_program_keeps_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_launches, "ONE_PROGRAM_SLOTS", 100)
    twin, pool = make_twin()
    slots = row_of(pool, 1, 900)
    runs = ((ALLOC, slots[:20]), (FREE, slots[:400]), (ALLOC, slots[:70]), (FREE, slots[60:130]))
    twin.apply_slot_runs(*runs_of(*runs))
    assert twin.assert_equal() == 60


def test_integers_of_runs_have_one_type() -> None:
    """Triton compiles for the type of an integer, which depends on its value."""
    for runs in ([(ALLOC, 1)], [(FREE, 2048)], [(FREE, 1)] * 3, [(ALLOC, 300), (FREE, 4)] * 2):
        assert 2**31 <= slot_launches.packed_runs(runs) < 2**63


@pytest.mark.parametrize("stride", [1, 4])
def test_pages_that_several_runs_free(stride: int) -> None:
    base = {} if stride == 1 else {"stride": stride, "chain_base": make_group(64, halves="K")}
    twin = Twin(make_group(SLOTS, halves="K", **base), make_state())
    word = record.pack_writer(1, 1, 1, record.State.LIVE)
    for each in (twin.group, twin.kernel_group):
        each.k_head[16:400, record.WORD_WRITER] = word
    page = torch.arange(64, 64 + 16, device=kernel_device())
    runs = ((FREE, page), (ALLOC, page), (FREE, torch.cat([page[3:5], page + 16, page[7:9]])))
    counts, listed = runs_of(*runs)
    calls = torch.zeros(len(listed), dtype=torch.int32, device=listed.device)
    calls[-2:] = 1  # the second call of the last run: its page is the first one's, too
    twin.apply_slot_runs(counts, listed, page_size=16, call_ids=calls)
    assert twin.assert_equal() == 2
    twin.apply_slot_runs(counts, listed, page_size=16, call_ids=None)
    twin.assert_equal()
    bad = make_group(16, halves="K", stride=4, chain_base=make_group(64, halves="K"))
    with pytest.raises(ValueError, match="expected pages of a multiple"):
        slot_launches.apply_slot_runs(counts, listed, bad, make_state(), 2, calls)


def test_numbers_of_frees_begin_anew():
    """2^31 numbers last for weeks; then the marks of old calls must not look like later ones."""
    twin, pool = make_twin()
    slots = row_of(pool, 1, 900)
    marks = twin.kernel_group.free_marks
    marks.take(free_marks.LAST_NUMBER - 2)
    for round_ in range(5):
        twin.apply_slot_event(FREE, torch.cat([slots[:10], slots[3:4]]))
        assert twin.assert_equal() == round_ + 1
        twin.apply_slot_event(ALLOC, slots[:10])
    assert marks.take(1) < 10


def test_calls_of_pages_that_split_a_slot_are_refused():
    base = make_group(64, halves="K")
    group = make_group(16, halves="K", stride=4, chain_base=base)
    listed = torch.arange(8, device=kernel_device())
    with pytest.raises(ValueError, match="multiple of 4 full slots, got 2"):
        slot_launches.apply_slot_event(FREE, listed, group, make_state(), 2, listed.int())


def test_reads_after_events():
    twin, pool = make_twin()
    slots = row_of(pool, 1, 900)
    twin.apply_slot_event(FREE, slots[100:200])
    twin.apply_slot_event(ALLOC, slots[150:170])
    twin.apply_slot_event(UNFILL, slots[300:310])
    plan = pool.decode([1, 2])
    for side in (Side.HEAD, Side.TAIL):
        twin.check_and_write(plan, side)
        twin.assert_equal()
    reasons = {Reason(row[1]) for row in ring_rows(twin.kernel_state)}
    unfilled = Reason.BAD_STATE  # the group is no draft's
    assert reasons == {Reason.USE_AFTER_FREE, Reason.UNWRITTEN_SINCE_ALLOC, unfilled}


@pytest.mark.parametrize("limit", [2048, 8], ids=["one launch", "more than one program holds"])
def test_moved_records(limit: int, monkeypatch):
    monkeypatch.setattr(slot_launches, "COPY_SLOTS", limit)
    twin, pool = make_twin()
    slots = row_of(pool, 1, 900)
    twin.copy_records(slots[:30], slots[100:130])
    twin.assert_equal()
    twin.copy_records(slots[:300].int(), slots[1:301].int())  # overlapping: all is read first
    twin.assert_equal()
    twin.copy_records(slots[::2][:50], slots[1::2][:50].flip(0))
    twin.assert_equal()
    twin.copy_records(slots[:0], slots[:0])
    twin.assert_equal()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
