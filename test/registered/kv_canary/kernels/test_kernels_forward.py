"""HEAD and TAIL launches: the Triton kernels do to records, ring and counters exactly what the NumPy reference does.

On a machine without a GPU the kernels run interpreted, on one with a GPU natively; the tests are the same.
"""

import sys
from dataclasses import replace

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary import record
from sglang_kv_canary.endpoint import Part
from sglang_kv_canary.kernels.layout import VERIFY_BLOCK, WRITE_TILE
from sglang_kv_canary.plan.plan_input import ForwardPlan
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import UNKNOWN, Column, Reason, State
from sglang_kv_canary.state import Header, TagCounter
from sglang_kv_canary_rigs.kernel_cases import (
    Pool,
    Twin,
    kernel_device,
    make_group,
    make_state,
    ring_rows,
)

register_cpu_ci(est_time=45, suite="stage-a-test-cpu")
register_cuda_ci(est_time=60, suite="stage-b-test-1-gpu-small")

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

SLOTS, CONTEXT, ROWS, WINDOW = 12000, 8192, 16, 300
LONG = (
    5 * WRITE_TILE + 77
)  # a chunk of more tiles than one turn of the kernel's loop over earlier tiles


def make_lut(dtype: torch.dtype) -> torch.Tensor:
    permutation = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(3)) + 1
    return torch.cat([torch.zeros(1, dtype=torch.int64), permutation]).to(kernel_device(), dtype)


SHAPES = {
    "K and V": {},
    "K only": {"halves": "K"},
    "draft, offset 1": {"kv_token_id_vs_position_offset": 1},
    "SWA, int64 mapping": {"kind": PoolKind.SWA, "window": WINDOW, "lut": torch.int64},
    "SWA, int32 mapping": {"kind": PoolKind.SWA, "window": WINDOW, "lut": torch.int32},
}


# What one forward launches: TAIL in one launch, or verified beside the layers and written behind them.
TOGETHER = ((Side.HEAD, Part.ALL), (Side.TAIL, Part.ALL))
APART = ((Side.HEAD, Part.ALL), (Side.TAIL, Part.VERIFY), (Side.TAIL, ~Part.VERIFY))
ALL_APART = ((Side.HEAD, ~Part.VERIFY), (Side.HEAD, Part.VERIFY), *APART[1:])


class Rig:
    """A pool with a twin; every forward runs HEAD and TAIL on both and compares."""

    def __init__(self, shape: str = "K and V", dtype: torch.dtype = torch.int64, **state):
        options = dict(SHAPES[shape])
        if "lut" in options:
            options["swa_index_lut"] = make_lut(options.pop("lut"))
        offset = options.get("kv_token_id_vs_position_offset", 0)
        self.pool = Pool(kernel_device(), SLOTS, CONTEXT, ROWS, index_dtype=dtype, offset=offset)
        self.twin = Twin(make_group(SLOTS, **options), make_state(request_rows=ROWS, **state))

    def forward(self, plan, launches=TOGETHER) -> int:
        for side, part in launches:
            self.twin.check_and_write(plan, side, part)
            rows = self.twin.assert_equal()
        return rows

    def slot(self, row: int, position: int) -> int:
        """Slot of the group that holds a position."""
        full = int(self.pool.req_to_token[row, position])
        lut = self.twin.group.swa_index_lut
        return full if lut is None else int(lut[full])

    def reasons(self) -> Reason:
        """All reasons in the ring."""
        total = Reason(0)
        for row in ring_rows(self.twin.kernel_state):
            total |= Reason(row[Column.REASONS - 1])
        return total

    def counter(self, tag_id: int, counter: TagCounter) -> int:
        return int(self.twin.kernel_state.counters[tag_id, counter])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.int64) for shape in SHAPES] + [("K and V", torch.int32)],
    ids=[*SHAPES, "int32 inputs"],
)
def test_clean_history(shape: str, dtype: torch.dtype):
    rig = Rig(shape, dtype)
    pool = rig.pool
    rig.forward(pool.extend({3: 1, 1: LONG, 7: VERIFY_BLOCK}, known=True))
    rig.forward(pool.decode([1, 3, 7], known=True))
    rig.forward(pool.extend({3: 40, 9: 2, 7: 1, 1: WRITE_TILE}))
    rig.forward(pool.pad(pool.decode([7, 3, 9]), 5))
    assert rig.forward(pool.target_verify([9, 3, 1], drafts=4)) == 0
    assert rig.counter(0 if rig.twin.group.window is None else 8, TagCounter.LAUNCHES) == 5


@pytest.mark.parametrize("launches", [APART, ALL_APART])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_apart_do_what_both_do(shape: str, launches):
    def damaged_history(launches) -> Rig:
        rig = Rig(shape)
        pool, slots = rig.pool, rig.twin.group.num_slots
        rig.forward(pool.extend({1: 700, 3: VERIFY_BLOCK + 1}), launches)
        rig.forward(pool.decode([1, 3]), launches)
        for position, side in ((650, "k_head"), (660, "k_tail"), (690, "k_tail")):
            rig.twin.poke(side, rig.slot(1, position), record.WORD_CHAIN, 5)
        pool.req_to_token[3, 100] = 2 * slots
        wrong = pool.decode([3, 1])
        wrong.write.positions[0] += 1
        assert rig.forward(pool.pad(wrong, 3), launches) > 0
        rig.forward(pool.target_verify([1, 3], drafts=4), launches)
        return rig

    together, apart = damaged_history(TOGETHER), damaged_history(launches)
    for name in ("k_head", "k_tail", "v_head", "v_tail"):
        expected = getattr(together.twin.kernel_group, name)
        assert expected is None or torch.equal(expected, getattr(apart.twin.kernel_group, name))
    states = together.twin.kernel_state, apart.twin.kernel_state
    assert torch.equal(*(state.counters for state in states))
    assert ring_rows(states[0]) == ring_rows(states[1])


def test_every_record_word_on_every_side():
    rig = Rig()
    rig.forward(rig.pool.extend({1: 600, 2: 10}))
    position = 0
    for side in ("k_head", "k_tail", "v_head", "v_tail"):
        for word in range(record.RECORD_WORDS):
            # the last three lie at a block's first slot, before it, and at the end
            for at in (position, VERIFY_BLOCK - 1 - position, 599 - position):
                rig.twin.poke(side, rig.slot(1, at), word, 1 << (3 + position))
            position += 1
    rig.twin.poke("v_head", rig.slot(1, VERIFY_BLOCK - 1), record.WORD_CHAIN, 5)
    rig.twin.poke("k_tail", rig.slot(1, 2 * VERIFY_BLOCK), record.WORD_CHAIN, 5)
    assert rig.forward(rig.pool.decode([1, 2], known=True)) > 40
    expected = Reason.POSITION | Reason.TOKEN | Reason.CHAIN | Reason.BAD_STATE
    assert rig.reasons() & expected == expected


@pytest.mark.parametrize("state", [*State, 5, 15])
def test_states(state: int):
    rig = Rig()
    rig.forward(rig.pool.extend({1: 300}))
    word = record.pack_writer(1, 1, 1, int(state))
    for side in ("k_head", "k_tail", "v_head", "v_tail"):
        for position in (0, 7, 8, 299) if side in ("k_head", "v_tail") else (7, 299):
            rig.twin.poke(side, rig.slot(1, position), record.WORD_WRITER, word)
            rig.twin.poke(side, rig.slot(1, position), record.WORD_CONTENT, 99)
    rows = rig.forward(rig.pool.decode([1]))
    assert (rows == 0) == (state == State.LIVE), rows


def test_another_requests_slot():
    rig = Rig()
    rig.forward(rig.pool.extend({1: 300, 2: 400}))
    rig.pool.req_to_token[1, 100] = rig.pool.req_to_token[2, 150]
    rig.pool.req_to_token[1, 200] = rig.pool.req_to_token[2, 200]
    assert rig.forward(rig.pool.decode([1, 2])) > 0
    assert rig.reasons() == Reason.POSITION | Reason.CHAIN


@pytest.mark.parametrize("shape", ["K and V", "SWA, int64 mapping"])
@pytest.mark.parametrize("value", [0, -1, -(1 << 31), SLOTS, (1 << 31) - 1])
def test_bad_slots_in_the_row_are_reported_not_read(shape: str, value: int):
    rig = Rig(shape)
    rig.forward(rig.pool.extend({1: 300, 2: 5}))
    for position in (0, 1, 255, 256, 299):
        rig.pool.req_to_token[1, position] = value
    assert rig.forward(rig.pool.decode([2, 1])) > 0
    assert rig.reasons() & (Reason.UNMAPPED_SLOT if value == 0 else Reason.SLOT_OUT_OF_RANGE)


@pytest.mark.parametrize("count", [1, WRITE_TILE, WRITE_TILE + 1])
def test_chain_behind_a_slot_that_is_unmapped(count: int):
    """It goes on from the row memory, which only a chunk of one tile may read: one program writes it."""
    rig = Rig()
    pool, group = rig.pool, rig.twin.kernel_group
    rig.forward(pool.extend({1: 300, 2: 5}))
    before = int(group.k_head[rig.slot(1, 299), record.WORD_CHAIN])
    pool.req_to_token[1, 299] = 0
    plan = pool.extend({1: count})
    rig.forward(plan)
    seed = before if count <= WRITE_TILE else 0
    expected = record.chain_step(seed, int(plan.write.input_ids[0]), 300)
    assert int(group.k_head[rig.slot(1, 300), record.WORD_CHAIN]) == expected


@pytest.mark.parametrize("value", [0, -5, SLOTS, 1 << 31])
def test_bad_mapping_values_are_reported_not_read(value: int):
    rig = Rig("SWA, int64 mapping")
    rig.forward(rig.pool.extend({1: 500, 2: 5}))
    for position in (100, 201, 202, 498, 499):  # 201 is the window's first
        full = rig.pool.req_to_token[1, position].long()
        rig.twin.group.swa_index_lut[full] = value
    assert rig.forward(rig.pool.decode([2, 1])) == 4 * 4
    expected = Reason.SWA_EVICTED_IN_WINDOW if value == 0 else Reason.SLOT_OUT_OF_RANGE
    assert rig.reasons() & expected


@pytest.mark.parametrize("row", [-1, -(1 << 31), ROWS, (1 << 31) - 1])
def test_bad_request_rows(row: int):
    rig = Rig()
    rig.forward(rig.pool.extend({1: 30, 2: 5}))
    plan = rig.pool.decode([1, 2])
    plan.verify.rows[0] = row
    assert rig.forward(plan) == 2  # K and V, HEAD only
    assert rig.reasons() == Reason.ROW_OUT_OF_RANGE


@pytest.mark.parametrize("length", [-5, CONTEXT, CONTEXT + 1, (1 << 31) - 1, -(1 << 31)])
def test_bad_lengths(length: int):
    rig = Rig()
    rig.forward(rig.pool.extend({1: 30, 2: 5}))
    plan = rig.pool.extend({1: 3, 2: 1})
    plan.verify.base_lens[0] = length
    assert rig.forward(plan) == 2
    assert rig.reasons() == Reason.LENGTH_OUT_OF_RANGE


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
def test_inputs_that_are_not_the_requests(decode: bool):
    rig = Rig("K and V")
    pool = rig.pool
    rig.forward(pool.extend({1: 30, 2: 5, 4: 9}))
    plan = (
        pool.decode([1, 2, 4], known=True)
        if decode
        else pool.extend({1: 1, 2: 1, 4: 3}, known=True)
    )
    plan.write.input_ids[0] += 1
    plan.write.positions[1] += 7
    plan.write.out_cache_loc[2] = SLOTS + 3
    assert rig.forward(plan) > 0
    expected = Reason.WRITE_TOKEN | Reason.WRITE_POSITION | Reason.SLOT_OUT_OF_RANGE
    assert rig.reasons() & expected == expected
    rig.forward(pool.decode([1, 2, 4], known=True))


def test_written_slots_that_the_mapping_has_not():
    rig = Rig("SWA, int64 mapping")
    rig.forward(rig.pool.extend({1: 30, 2: 5}))
    plan = rig.pool.extend({1: 20, 2: 4})
    rig.twin.group.swa_index_lut[plan.write.out_cache_loc[3]] = 0
    rig.twin.group.swa_index_lut[plan.write.out_cache_loc[22]] = SLOTS
    plan.write.out_cache_loc[7] = 0
    assert rig.forward(plan) == 2
    assert rig.forward(rig.pool.decode([1, 2])) > 2


def located(rig: Rig, plan: ForwardPlan) -> ForwardPlan:
    """`plan` with what attention uses: the mapping as it is now, int32."""
    swa = rig.twin.group.swa_index_lut[plan.write.out_cache_loc.long()].to(torch.int32)
    return replace(plan, write=replace(plan.write, swa_out_cache_loc=swa))


@pytest.mark.parametrize("shape", ["SWA, int64 mapping", "SWA, int32 mapping"])
def test_location_that_attention_writes_to(shape: str):
    """In tiles, by decodes with padding, by trees: silent while it is the mapping's, reported where it is not."""
    rig = Rig(shape)
    pool = rig.pool
    assert rig.forward(located(rig, pool.extend({1: WRITE_TILE + 30, 2: 5}))) == 0
    plan = located(rig, pool.pad(pool.decode([1, 2]), 3))
    plan.write.swa_out_cache_loc[2:] = 9  # padding is written to slot 0, wherever that is
    assert rig.forward(plan) == 0
    plans = [
        located(rig, pool.extend({2: 3, 1: WRITE_TILE + 40})),
        located(rig, pool.decode([2, 1])),
        located(rig, pool.tree_verify([1, 2], [[-1, 0, 0], [-1, 0, 1]])),
    ]
    for number, plan in enumerate(plans, 1):
        for token in (0, -1):
            before = int(plan.write.swa_out_cache_loc[token])
            plan.write.swa_out_cache_loc[token] = before ^ 1
        assert rig.forward(plan) == number * 4  # K and V of two tokens, HEAD only
        assert rig.reasons() == Reason.WRITE_LOCATION


@pytest.mark.parametrize(
    ("mapped", "stored", "reason"),
    [
        (0, 0, None),
        (0, 5, Reason.WRITE_LOCATION),
        (7, 0, Reason.WRITE_LOCATION),
        (SLOTS, 5, Reason.SLOT_OUT_OF_RANGE),
    ],
)
def test_location_where_the_mapping_has_none(mapped: int, stored: int, reason: Reason | None):
    rig = Rig("SWA, int64 mapping")
    plan = located(rig, rig.pool.extend({1: 30}))
    rig.twin.group.swa_index_lut[plan.write.out_cache_loc[3]] = mapped
    plan.write.swa_out_cache_loc[3] = stored
    assert rig.forward(plan) == (0 if reason is None else 2)
    assert rig.reasons() == (reason or Reason(0))


def test_budget_visits_every_block_in_turn():
    rig = Rig(verify_budget_slots=3 * VERIFY_BLOCK)
    rig.forward(rig.pool.extend({1: 2000, 2: 700, 3: 10, 4: 1}))
    checked = []
    for _ in range(8):
        rig.forward(rig.pool.decode([3, 1, 4, 2]))
        checked.append(rig.counter(0, TagCounter.CHECKED))
    steps = torch.tensor(checked).diff()
    assert int(steps.max()) <= 3 * VERIFY_BLOCK
    rig.twin.poke("k_head", rig.slot(1, 1500), record.WORD_CHAIN, 1)
    rows = [rig.forward(rig.pool.decode([3, 1, 4, 2])) for _ in range(10)]  # 2 k
    assert rows[-1] >= 2


def test_anchor_of_the_first_slot():
    rig = Rig()
    rig.forward(rig.pool.extend({1: 30, 2: 5}))
    for state in (rig.twin.state, rig.twin.kernel_state):
        state.anchors[1] += 1
    assert rig.forward(rig.pool.decode([1, 2])) == 4
    assert rig.reasons() == Reason.CHAIN


def test_unarmed_counts_forwards_and_does_nothing_else():
    rig = Rig()
    for state in (rig.twin.state, rig.twin.kernel_state):
        state.set_armed(False)
    rig.forward(rig.pool.extend({1: 30, 2: 5}))
    rig.forward(rig.pool.decode([1, 2]))
    assert rig.twin.kernel_state.summary[:2].tolist() == [2, 2]
    assert int(rig.twin.kernel_group.k_head.abs().sum()) == 0


@pytest.mark.parametrize("capacity", [1, 7, 64])
def test_full_ring_keeps_whole_rows(capacity: int):
    """More bad slots than the ring holds: all are counted, and each row that is left is one of them, entire.

    Who has read them is known of the lost ones, too.
    """
    rig = Rig(ring_capacity=capacity)
    rig.twin.state = make_state(request_rows=ROWS)  # the reference keeps every row
    plans = rig.pool.extend({1: 900, 2: 5}), rig.pool.decode([1, 2])
    rig.twin.check_and_write(plans[0], Side.HEAD)
    for position in range(900):
        rig.twin.poke("v_head", rig.slot(1, position), record.WORD_IDENTITY, position * 3)
    rig.twin.check_and_write(plans[1], Side.HEAD)
    states = rig.twin.state, rig.twin.kernel_state
    total, kernel_total = (int(state.violations.total) for state in states)
    assert kernel_total == total > 890
    every = set(ring_rows(states[0]))
    assert all(row in every for row in ring_rows(states[1]))
    sequences = states[1].violations.rows[:, Column.SEQUENCE].sort().values.tolist()
    assert sequences == list(range(total - capacity, total))
    readers = [state.violations.readers.tolist() for state in states]
    assert readers[0] == readers[1]
    assert max(readers[1][1]) == 1  # the number of the forward: no TAIL has run
    assert max(readers[1][2]) == UNKNOWN


def test_empty_and_tiny_batches():
    rig = Rig()
    rig.forward(rig.pool.extend({1: 1}))
    rig.forward(rig.pool.decode([1]))
    plan = rig.pool.pad(rig.pool.decode([1]), 3)
    empty = replace(
        plan,
        verify=replace(plan.verify, rows=plan.verify.rows[:0], base_lens=plan.verify.base_lens[:0]),
        write=replace(plan.write, out_cache_loc=plan.write.out_cache_loc[:0]),
    )
    rig.twin.check_and_write(empty, Side.TAIL)
    rig.twin.assert_equal()


@pytest.mark.parametrize("drafts", [9, 60])
def test_drafts_of_more_requests_than_a_block_holds(drafts):
    """A block of 128 tokens does not end with a request's last draft."""
    rig, rows = Rig(), list(range(1, ROWS))
    rig.forward(rig.pool.extend({row: 3 + row % 5 for row in rows}))
    for _ in range(2):
        assert rig.forward(rig.pool.target_verify(rows, drafts=drafts)) == 0
    assert rig.forward(rig.pool.decode(rows)) == 0


def test_many_tokens_for_each_request():
    rig = Rig()
    rig.forward(rig.pool.extend({1: 30, 2: 5}))
    rig.forward(rig.pool.target_verify([2, 1], drafts=100))
    assert rig.forward(rig.pool.decode([2, 1])) == 0


@pytest.mark.parametrize("count", [2, 40])
def test_draft_trees(count: int):
    rig = Rig()
    rows = list(range(1, count + 1))
    rig.pool = Pool(kernel_device(), SLOTS, CONTEXT, count + 1)
    rig.twin = Twin(make_group(SLOTS), make_state(request_rows=count + 1))
    rig.forward(rig.pool.extend({row: row for row in rows}))
    generator = torch.Generator().manual_seed(5)
    trees = [
        [int(torch.randint(-1, max(i, 1), (1,), generator=generator)) for i in range(9)]
        for _ in rows
    ]
    trees[0] = [-1, 0, 1, 2, 3, 4, 5, 6, 7]
    trees[1] = [-1, 9, -7, 3, 2, 0, 1, 99, 5]
    assert rig.forward(rig.pool.tree_verify(rows, trees)) == 0


def test_chains_that_step_from_another_pool():
    target = Rig()
    draft = Rig()
    draft.pool = target.pool
    draft.twin.group = replace(draft.twin.group, chain_source=target.twin.group.k_head)
    draft.twin.kernel_group = replace(
        draft.twin.kernel_group, chain_source=target.twin.kernel_group.k_head
    )
    pool = target.pool
    plans = [
        pool.extend({1: 300, 2: WRITE_TILE + 5, 3: 1}),
        pool.decode([2, 3]),
        pool.target_verify([3, 1], drafts=4),
        pool.tree_verify([1, 2], [[-1, -1, 0, 1, 1], [-1, 0, 1, 2, 3]]),
    ]
    for plan in plans:
        target.forward(plan)
        draft.forward(plan)
    target.twin.poke("k_head", target.slot(1, 17), record.WORD_CHAIN, 1)
    pool.lengths[1] -= 5  # none of the tree's tokens is accepted
    assert draft.forward(pool.decode([1])) == 4
    assert draft.reasons() == Reason.CHAIN


def test_prefix_that_an_earlier_forward_verified():
    rig = Rig("SWA, int64 mapping")
    rig.forward(rig.pool.extend({1: 700, 2: 5}))
    for position in range(400, 699):  # the last one's chain is also the row's
        rig.twin.poke("k_head", rig.slot(1, position), record.WORD_CHAIN, 1)
    plan = rig.pool.decode([1, 2])
    assert rig.forward(replace(plan, verify=replace(plan.verify, already_verified=True))) == 0


@pytest.mark.parametrize("padded", [True, False])
def test_padding_with_a_stale_row_is_told_by_its_slot(padded):
    """A graph's padding keeps the row of a request that is gone, and a length of 1 or more."""
    rig = Rig()
    rig.forward(rig.pool.extend({1: 20, 2: 30}))
    rig.twin.poke("k_head", rig.slot(2, 7), record.WORD_CHAIN, 1)
    plan = rig.pool.target_verify([1, 2], drafts=3)
    plan.write.out_cache_loc[3:] = 0
    found = rig.forward(replace(plan, verify=replace(plan.verify, padded=padded)))
    assert (found == 0) == padded


def test_scratch_belongs_to_the_forward_that_verified():
    rig = Rig()
    rig.forward(rig.pool.extend({1: 20}))
    rig.twin.poke("k_tail", rig.slot(1, 7), record.WORD_CHAIN, 1)
    first, second = (scratch(rig.pool.decode([1]), inner_step) for inner_step in (0, 1))
    found = rig.forward(first, parts_of(first))
    assert found > 0
    written = rig.twin.group.k_tail.clone()
    assert rig.forward(second, parts_of(second)) == found
    assert torch.equal(rig.twin.group.k_tail, written)
    slot = rig.slot(1, 21)
    assert int(rig.twin.group.k_head[slot, record.WORD_WRITER]) & record.FORWARD_MASK == 2
    summary = rig.twin.kernel_state.summary
    assert summary[Header.FORWARD_RUNNING] == summary[Header.FORWARD_DONE] == 2


def scratch(plan, inner_step: int):
    """As `PlanInput._draft_decode` has it."""
    verify = replace(plan.verify, already_verified=inner_step > 0)
    return replace(plan, verify=verify, write=replace(plan.write, scratch=True))


def parts_of(plan):
    launches = [(side, plan.parts(side)) for side in (Side.HEAD, Side.TAIL)]
    return [(side, part) for side, part in launches if part]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
