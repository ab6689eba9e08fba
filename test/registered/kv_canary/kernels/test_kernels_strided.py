"""Strided groups, check by check, on every backend: each check fires on its fault, and its clean twin is silent."""

import sys
from dataclasses import replace

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary import record
from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.endpoint import Part
from sglang_kv_canary.launch.launcher import Launcher
from sglang_kv_canary.plan.expected_inputs import RowStart
from sglang_kv_canary.plan.plan_input import UnsupportedForwardError
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import PREV_ANCHOR, Mode, Reason, State
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary_rigs.backends import REFERENCE, Backend, available_backends
from sglang_kv_canary_rigs.kernel_cases import Pool, Twin, kernel_device, make_group, make_state
from sglang_kv_canary_rigs.oracle import Forward, Request, SweepEntry
from sglang_kv_canary_rigs.scene import assert_clean, assert_violation
from sglang_kv_canary_rigs.world import RingViolation, World, WorldSpec

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")
register_cuda_ci(est_time=90, suite="stage-b-test-1-gpu-small")

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

STRIDE, PAGE = 4, 8
HEAD, TAIL = "HEAD_K_C4", "TAIL_K_C4"


@pytest.fixture(params=available_backends(), ids=lambda b: b.name)
def backend(request) -> Backend:
    return request.param


class Strided(World):
    """Row r owns full slots 32 r .. 32 r + 31, in order; the base group is SWA, one slot behind each full slot."""

    def __init__(self, backend: Backend, **spec) -> None:
        sizes = {"num_slots": 128, "context_len": 32, "request_rows": 4, "swa_slots": 140}
        super().__init__(
            WorldSpec(**{**sizes, "has_v": False, "stride": STRIDE, "page_size": PAGE, **spec}),
            backend,
        )
        for slot in range(32, 128):
            self.swa.lut[slot] = slot + 1
        for row in range(1, 4):
            self.table[row] = [32 * row + position for position in range(32)]
        self.lengths = [0] * 4
        self.arm()
        self.upload()

    def extend(self, row: int, tokens, **changes) -> list[RingViolation]:
        """A forward that brings `tokens` of a row; `changes`: prefix, positions, out_slots, mode, uniform."""
        start = changes.pop("prefix", self.lengths[row])
        count = len(tokens)
        values = {
            "positions": tuple(range(start, start + count)),
            "out_slots": tuple(32 * row + p for p in range(start, start + count)),
            **changes,
        }
        row_start = RowStart.KEEP if start else 0  # without earlier tokens it is new in its row
        request = Request(row, start, count, 0, row_start=row_start)
        forward = Forward((request,), tuple(tokens), **values)
        self.upload()
        plan = self.plan(forward)
        self.head(plan)
        for memory in (m for g in self.groups for m in g.memories["K"]):
            for slot in range(memory.layout.page_size, 30):
                memory.write(slot, bytes([(7 * self.lengths[row] + slot) % 251]))
        self.tail(plan)
        self.lengths[row] = start + count
        return self.take_violations()

    def read(self, row: int) -> list[RingViolation]:
        """A forward of a row that writes to the padding slot."""
        length = self.lengths[row]
        found = self.extend(row, [9], out_slots=(0,))
        self.lengths[row] = length
        return [v for v in found if "C4" in v.tag]

    def slots(self, side: str = "HEAD") -> dict[int, tuple[int, ...]]:
        return self.records(self.strided, "K", side)

    def base_chain(self, full_slot: int) -> int:
        return self.records(self.swa, "K", Side.HEAD)[self.swa.lut[full_slot]][record.WORD_CHAIN]


def served(backend: Backend, **spec) -> Strided:
    """Row 1 with 14 tokens in chunks of 6, 7 and 1; row 2 with 8 others."""
    world = Strided(backend, **spec)
    assert_clean(world.extend(1, range(100, 106)))
    assert_clean(world.extend(1, range(106, 113)))
    assert_clean(world.extend(1, [113], mode=Mode.DECODE, uniform=True))
    assert_clean(world.extend(2, range(200, 208)))
    return world


# What is written


def test_only_the_last_token_writes_a_slot(backend):
    world = Strided(backend)
    assert_clean(world.extend(1, range(100, 106)))
    assert sorted(world.slots()) == [8]
    assert_clean(world.extend(1, [106], mode=Mode.DECODE, uniform=True))
    assert sorted(world.slots()) == [8]
    assert_clean(world.extend(1, [107], mode=Mode.DECODE, uniform=True))
    assert sorted(world.slots()) == sorted(world.slots("TAIL")) == [8, 9]
    assert record.unpack_writer(world.slots()[9][record.WORD_WRITER]) == (3, 1, Mode.DECODE, 1)
    assert world.counter(HEAD, TagCounter.WRITTEN) == world.counter(TAIL, TagCounter.WRITTEN) == 2
    assert world.counter(HEAD, TagCounter.CHECKED) == 2  # one slot in each of the last two forwards


def test_the_record_has_the_base_groups_chain_and_its_fold(backend):
    world = served(backend)
    world.anchors[3] = 12345
    assert_clean(world.extend(3, range(300, 309)))
    for row, numbers in ((1, 3), (2, 2), (3, 2)):
        previous = world.anchors[row]
        for number in range(numbers):
            last = number * STRIDE + STRIDE - 1
            identity, chain, _, _ = world.slots()[8 * row + number]
            assert chain == world.base_chain(32 * row + last)
            fold = record.chain_fold(chain, previous, STRIDE)
            assert identity == record.pack_identity(fold, last)
            previous = chain


def test_the_fold_is_what_the_tokens_in_between_add():
    """chain - previous * A^stride depends on the slot's own tokens and positions only."""
    folds = set()
    for first in (0, 77):
        chain = previous = first
        for position in range(4, 8):
            chain = record.chain_step(chain, 1000 + position, position)
        folds.add(record.chain_fold(chain, previous, 4))
        assert record.chain_fold(chain, previous + 1, 4) not in folds
    assert len(folds) == 1
    assert -(1 << 31) <= folds.pop() < 1 << 31


def test_a_chunk_that_does_not_complete_a_slot_writes_none(backend):
    world = Strided(backend)
    assert_clean(world.extend(1, [1, 2]))
    assert_clean(world.extend(1, [3]))
    assert world.slots() == {}
    assert world.counter(HEAD, TagCounter.ELIGIBLE) == 0


def test_a_slot_is_written_again_by_a_later_forward(backend):
    """Target verify: positions of rejected drafts come again, with other tokens."""
    world = served(backend)
    assert_clean(world.extend(1, [1, 2, 3, 4], uniform=True, mode=Mode.TARGET_VERIFY))
    before = world.slots()[8 + 3]
    world.lengths[1] = 15  # the first one is accepted
    assert_clean(world.extend(1, [5, 6, 7, 8], uniform=True, mode=Mode.TARGET_VERIFY))
    assert world.slots()[8 + 3] != before
    assert_clean(world.read(1))


# What is verified


def test_clean_twin(backend):
    world = served(backend)
    assert_clean(world.read(1))
    assert_clean(world.read(2))


@pytest.mark.parametrize(
    ("word", "bit", "reason", "places"),
    [
        (record.WORD_IDENTITY, 0, Reason.CHAIN, [1]),
        (record.WORD_IDENTITY, 31, Reason.CHAIN, [1]),
        (record.WORD_IDENTITY, 32, Reason.POSITION, [1]),
        (record.WORD_CHAIN, 0, Reason.CHAIN, [1, 2]),
        (record.WORD_CHAIN, 63, Reason.CHAIN, [1, 2]),
        (record.WORD_WRITER, 60, Reason.BAD_STATE, [1]),
        (record.WORD_WRITER, 5, Reason.BAD_STATE, [1]),
        (record.WORD_WRITER, 62, Reason.BAD_STATE, [1]),
    ],
)
@pytest.mark.parametrize("side", ["HEAD", "TAIL"])
def test_a_damaged_record(backend, side, word, bit, reason, places):
    world = served(backend)
    world.flip_record(world.strided, "K", side, 9, word, bit)
    found = world.read(1)
    assert {v.tag for v in found} == {f"{side}_K_C4"}
    assert [v.values["slot"] for v in found] == [8 + place for place in places]
    assert {v.reasons for v in found} == {reason}
    expected = [place * STRIDE + STRIDE - 1 for place in places]
    assert [v.values["expected_position"] for v in found] == expected


def test_a_record_of_an_open_slot_is_not_looked_at(backend):
    world = served(backend)
    world.flip_record(world.strided, "K", "HEAD", 8 + 3, record.WORD_CHAIN, 7)
    world.flip_record(world.strided, "K", "HEAD", 8 + 3, record.WORD_WRITER, 62)
    assert_clean(world.read(1))


def test_another_requests_slot(backend):
    world = served(backend)
    world.table[1][4] = 2 * 32 + 4  # the first token of row 1's second slot
    found = world.read(1)
    # The same position of another request: only the chain tells, here and at the successor.
    assert [(v.tag, v.values["slot"], v.reasons) for v in found] == [
        (tag, slot, Reason.CHAIN) for tag in (HEAD, TAIL) for slot in (2 * 8 + 1, 10)
    ]
    for v in found:
        assert v.values["expected_chain"] is None
        assert v.values["expected_token"] != v.values["stored_token"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (0, Reason.UNMAPPED_SLOT),
        (STRIDE - 1, Reason.UNMAPPED_SLOT),
        (-1, Reason.SLOT_OUT_OF_RANGE),
        (128, Reason.SLOT_OUT_OF_RANGE),
        (1 << 30, Reason.SLOT_OUT_OF_RANGE),
        (120, Reason.NEVER_WRITTEN),
    ],
)
def test_a_row_that_points_nowhere(backend, value, reason):
    world = served(backend)
    world.table[1][8] = value
    assert_violation(world.read(1), reason, [HEAD, TAIL], full_slot=value, expected_position=11)


def test_entries_that_no_backend_reads_for_compressed_slots_are_the_base_groups_business(backend):
    world = served(backend)
    world.table[1][5] = 0
    assert_clean(world.read(1))


def test_wrong_position_and_slot_of_the_last_token(backend):
    world = served(backend)
    found = world.extend(1, [1, 2], positions=(14, 17), out_slots=(46, 1 << 20))
    found = [v for v in found if "C4" in v.tag]
    reasons = Reason.WRITE_POSITION | Reason.SLOT_OUT_OF_RANGE
    values = {"expected_position": 15, "stored_position": 17, "stored_token": None}
    assert_violation(found, reasons, [HEAD], reader_row=1, **values)


def test_the_last_token_may_be_padding_and_must_not_lie_before_the_pool(backend):
    world = served(backend)
    assert_clean(world.extend(1, [1, 2], positions=(14, 17), out_slots=(0, 0)))
    world.lengths[1] = 14
    found = [v for v in world.extend(1, [1, 2], out_slots=(46, -1)) if "C4" in v.tag]
    assert_violation(found, Reason.SLOT_OUT_OF_RANGE, [HEAD], full_slot=-1, reader_row=1)


def test_a_token_that_is_not_the_last_of_its_slot_writes_none(backend):
    """The last one by its position, in a slot that another token completes."""
    world = served(backend)
    world.extend(1, [1, 2], out_slots=(46, 45))
    assert 11 not in world.slots()


def test_a_slot_after_one_that_the_base_group_cannot_read_folds_from_0(backend):
    """What is reported of such slots is moot, and told by this fold."""
    world = Strided(backend)
    world.swa.lut[32 + STRIDE - 1] = 0
    world.extend(1, range(100, 108))
    identity, chain, _, _ = world.slots()[9]
    assert chain == world.base_chain(32 + 7)
    assert identity == record.pack_identity(record.chain_fold(chain, 0, STRIDE), 7)


def test_bad_requests_are_reported_once(backend):
    world = served(backend)
    world.extend(1, [1], prefix=14)
    request = Request(99, 4, 1, 0)
    world.upload()
    plan = world.plan(Forward((request,), (1,), (4,), (0,)))
    world.head(plan)
    found = [v for v in world.take_violations() if v.tag == HEAD]
    assert_violation(found, Reason.ROW_OUT_OF_RANGE, [HEAD], reader_row=99)


def test_a_prefix_that_an_earlier_forward_verified(backend):
    world = served(backend)
    world.flip_record(world.strided, "K", "HEAD", 9, record.WORD_CHAIN, 3)
    assert_clean([v for v in world.extend(1, [1], already_verified=True) if "C4" in v.tag])


# Frees


def test_a_page_that_is_freed(backend):
    world = served(backend)
    world.event(SlotEventKind.FREE, [32 + p for p in range(14)], world.strided)
    assert_clean(world.take_violations())
    states = {s: record.unpack_writer(w[3])[3] for s, w in world.slots().items()}
    assert states == {8: State.FREED, 9: State.FREED, 10: State.FREED, 16: 1, 17: 1}
    found = world.read(1)
    assert {v.reasons for v in found} == {Reason.USE_AFTER_FREE}
    assert len(found) == 6
    assert all(record.unpack_writer(v.values["last_writer"])[1] == 1 for v in found)


def test_one_token_frees_its_whole_page_and_no_other(backend):
    world = served(backend)
    world.event(SlotEventKind.FREE, [32 + 6], world.strided)
    states = {s: record.unpack_writer(w[3])[3] for s, w in world.slots().items()}
    assert states == {8: State.FREED, 9: State.FREED, 10: 1, 16: 1, 17: 1}


@pytest.mark.parametrize("page_size", [1, STRIDE, PAGE])
def test_double_free_is_one_row_a_slot_whatever_the_page(backend, page_size):
    world = served(backend, page_size=page_size)
    slots = [32 + p for p in range(8)]
    world.event(SlotEventKind.FREE, slots, world.strided)
    assert_clean(world.take_violations())
    world.event(SlotEventKind.FREE, slots, world.strided)
    found = world.take_violations()
    assert [(v.tag, v.reasons) for v in found] == [(HEAD, Reason.DOUBLE_FREE)] * 2
    assert [(v.values["slot"], v.values["full_slot"]) for v in found] == [(8, 32), (9, 36)]


@pytest.mark.parametrize("cut", [0, 3, 4, 8], ids="first call lists {} tokens".format)
def test_a_page_that_two_calls_free(backend, cut):
    """Slots 8 and 9 of one page, once in the first call and then token by token in the second."""
    world = served(backend)
    slots = [32 + p for p in range(8)]
    call_ids = [0] * cut + [1] * 8
    world.event(SlotEventKind.FREE, slots[:cut] + slots, world.strided, call_ids)
    found = world.take_violations()
    assert {v.reasons for v in found} <= {Reason.DOUBLE_FREE}
    assert sorted(v.values["slot"] for v in found) == ([8, 9] if cut else [])


def test_a_slot_that_is_handed_out_and_written_again(backend):
    world = served(backend)
    world.event(SlotEventKind.FREE, [64 + p for p in range(8)], world.strided)
    world.event(SlotEventKind.ALLOC, [64, 65], world.strided)
    assert {v.reasons for v in world.read(2)} == {
        Reason.UNWRITTEN_SINCE_ALLOC,
        Reason.USE_AFTER_FREE,
    }
    world.event(SlotEventKind.ALLOC, [66, 67, 68, 69, 70, 71], world.strided)
    world.lengths[2] = 0
    assert_clean(world.extend(2, range(300, 308)))
    assert_clean(world.read(2))


def test_a_flush_frees_everything(backend):
    world = served(backend)
    world.event(SlotEventKind.CLEAR, None, world.strided)
    assert {v.reasons for v in world.read(1)} == {Reason.USE_AFTER_FREE}


# The sweep's list


def entries(world: Strided, row: int) -> list[SweepEntry]:
    slots = [8 * row + n for n in range(world.lengths[row] // STRIDE)]
    previous = [PREV_ANCHOR, *slots[:-1]]
    return [
        SweepEntry(s, n * STRIDE + STRIDE - 1, p)
        for n, (s, p) in enumerate(zip(slots, previous, strict=True))
    ]


def test_sweep(backend):
    world = served(backend)
    world.sweep(entries(world, 1), world.strided, content=False)
    assert_clean(world.take_violations())
    world.flip_record(world.strided, "K", "TAIL", 9, record.WORD_CHAIN, 30)
    world.sweep(entries(world, 1), world.strided, content=False)
    found = world.take_violations()
    assert [(v.tag, v.values["slot"], v.reasons) for v in found] == [
        ("SWEEP_K_C4", slot, Reason.CHAIN) for slot in (9, 10)
    ]


# Large batches: the kernels against the reference


TOGETHER = ((Side.HEAD, Part.ALL), (Side.TAIL, Part.ALL))
APART = ((Side.HEAD, Part.ALL), (Side.TAIL, Part.VERIFY), (Side.TAIL, ~Part.VERIFY))


@pytest.mark.parametrize("stride", [4, 128])
@pytest.mark.parametrize(
    ("dtype", "launches"),
    [(torch.int64, TOGETHER), (torch.int32, APART)],
    ids=["together", "beside the layers, int32"],
)
def test_long_chunks_and_many_blocks(stride, dtype, launches):
    """More slots than one work item holds, and a budget below them; pages of 256 tokens."""
    pages, device = 40, kernel_device()
    pool = Pool(device, 256 * pages, 4096, 6, index_dtype=dtype)
    order = (torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    pages_of = {1: order[:16], 2: order[16:20], 3: order[20:21]}
    base = Twin(make_group(256 * pages, halves="K"), make_state(request_rows=6))
    strided = make_group(
        256 * pages // stride, halves="K", kind=PoolKind.C4, stride=stride, chain_base=base.group
    )
    twin = Twin(strided, make_state(request_rows=6, verify_budget_slots=512))
    twin.kernel_group = replace(twin.kernel_group, chain_base=base.kernel_group)

    def launch(plan) -> int:
        for side, part in launches:
            base.check_and_write(plan, side, part)
            twin.check_and_write(plan, side, part)
        return twin.assert_equal()

    def allocate(counts: dict[int, int]) -> dict[int, int]:
        """The slots that the pool hands out next are those at the positions' places in the rows' pages."""
        spans = [(row, pool.lengths.get(row, 0), count) for row, count in counts.items()]
        slots = [
            256 * pages_of[row][p // 256] + p % 256
            for row, start, count in spans
            for p in range(start, start + count)
        ]
        pool.free = slots[::-1]
        return counts

    for counts in ({1: 2050, 3: 3, 2: 600}, {2: 130, 1: 1501}, {3: 126}):
        assert launch(pool.extend(allocate(counts))) == 0
    for _ in range(3):
        assert launch(pool.decode(list(allocate({1: 1, 2: 1, 3: 1})))) == 0
    written = int((twin.kernel_group.k_tail[:, record.WORD_WRITER] != 0).sum())
    assert written == sum(pool.lengths[row] // stride for row in (1, 2, 3))
    twin.poke("k_head", 256 * pages_of[1][3] // stride, record.WORD_CHAIN, 5)
    plan = pool.decode(list(allocate({1: 1})))
    assert max(launch(plan) for _ in range(8)) >= 1  # the budget lets every block have its turn


# What is refused


def test_trees_are_refused(backend):
    world = served(backend)
    request = Request(1, 14, 2, 0)
    forward = Forward((request,), (1, 2), (14, 15), (46, 47), parents=(-1, 0), uniform=True)
    plan = world.plan(forward)
    with pytest.raises(UnsupportedForwardError, match="draft trees"):
        world.head(plan)


def test_moved_tokens_are_refused():
    world = served(REFERENCE)
    groups = tuple(g.group for g in world.groups)
    launcher = Launcher(REFERENCE.functions, groups, world.state, ContentMode.NONE)
    with pytest.raises(ValueError, match="a slot of C4 stands for 4 tokens"):
        launcher.copy_records(world.strided.group, torch.tensor([8]), torch.tensor([9]))


def test_a_strided_group_needs_a_base_of_stride_one_before_it():
    base = make_group(64, halves="K")
    options = {"halves": "K", "kind": PoolKind.C4, "stride": 4}
    group = make_group(16, chain_base=base, **options)
    for broken, why in (
        ({"chain_base": None}, "expected one as chain_base, got None"),
        ({"chain_base": group}, "expected one as chain_base, got C4"),
        ({"stride": 6}, "power of two, got 6"),
        ({"window": 5}, "has no window"),
        ({"v_head": base.k_head[:16].clone(), "v_tail": base.k_head[:16].clone()}, "no v_head"),
        ({"stride": 1}, "chain_base is for strided groups"),
    ):
        fields = {
            n: getattr(group, n) for n in ("kind", "k_head", "k_tail", "stride", "chain_base")
        }
        with pytest.raises(ValueError, match=why):
            CanaryBufferGroup(**{**fields, **broken})
    state = make_state(device=torch.device("cpu"))
    with pytest.raises(ValueError, match="C4 uses the chains of FULL, which must come before"):
        Launcher(REFERENCE.functions, (group, base), state, None)
    Launcher(REFERENCE.functions, (base, group), state, None)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
