"""The plan of a sweep: the walk's entries in the slot space that is swept; evicted slots cannot trip a check."""

import sys

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.plan.plan_input import SweepVerifyPlan
from sglang_kv_canary.record import PREV_ANCHOR, PREV_UNREACHABLE
from sglang_kv_canary.sweep.chunk import RadixCacheWalkResult, WalkSegment
from sglang_kv_canary.sweep.radix_cache_walker import RadixCacheWalker, UnsupportedRadixCacheError
from sglang_kv_canary.sweep.sweep_plan_builder import (
    build_strided_sweep_plan,
    build_verify_plan_radix_sweep,
    warm_up_sweep_plan,
)
from sglang_kv_canary.sweep.walkers import walk_radix_cache_for_canary
from sglang_kv_canary_rigs.radix_fixtures import make_tree

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

LUT = torch.tensor(
    [0, 11, 0, 13, 14, 15, -1]
)  # full slots 0-6, as SGLang's: 0 = evicted, the last entry is -1


def walk_of(slots, prevs, positions=None, extra_key=None) -> RadixCacheWalkResult:
    """A walk's result with one segment."""
    positions = list(range(len(slots))) if positions is None else positions
    return RadixCacheWalkResult(
        torch.tensor(slots),
        torch.tensor(positions),
        torch.tensor(prevs),
        (WalkSegment(0, len(slots), positions[0], extra_key),),
    )


def as_lists(plan: SweepVerifyPlan) -> tuple[list[int], list[int], list[int]]:
    for tensor in (plan.slots, plan.positions, plan.prev_slots):
        assert tensor.dtype == torch.int64
    return plan.slots.tolist(), plan.positions.tolist(), plan.prev_slots.tolist()


def test_without_a_mapping_the_plan_is_the_walk():
    plan = build_verify_plan_radix_sweep(walk_of([3, 1, 2], [PREV_ANCHOR, 3, 1]))
    assert as_lists(plan) == ([3, 1, 2], [0, 1, 2], [PREV_ANCHOR, 3, 1])
    assert plan.anchors is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_slots_and_predecessors_are_translated(dtype):
    plan = build_verify_plan_radix_sweep(walk_of([3, 1, 4], [PREV_ANCHOR, 3, 1]), LUT.to(dtype))
    assert as_lists(plan) == ([13, 11, 14], [0, 1, 2], [PREV_ANCHOR, 13, 11])


def test_an_evicted_slot_becomes_the_padding_slot_and_an_evicted_predecessor_unreachable():
    walk = walk_of([1, 2, 3, 4], [PREV_ANCHOR, 1, 2, 3])
    plan = build_verify_plan_radix_sweep(walk, LUT)
    assert as_lists(plan) == (
        [11, 0, 13, 14],
        [0, 1, 2, 3],
        [PREV_ANCHOR, 11, PREV_UNREACHABLE, 13],
    )


def test_a_strided_plan_has_each_slot_once_with_the_position_of_its_last_token():
    slots = [*range(8, 16), *range(40, 44)]
    plan = build_strided_sweep_plan(walk_of(slots, [PREV_ANCHOR, *slots[:-1]]), 4)
    assert as_lists(plan) == ([2, 3, 10], [3, 7, 11], [PREV_ANCHOR, 2, 3])


@pytest.mark.parametrize("room", [1, 3, 4, 5, 8, 11, 100])
def test_a_strided_plan_does_not_care_where_the_budget_cuts_the_walk(room):
    """Prefixes of a real tree with pages of 8, walked in chunks of any size."""
    real = make_tree("radix", page_size=8)
    real.insert(range(24))
    real.insert([*range(8), *range(100, 120)])
    real.insert(range(500, 516), extra_key="salt")

    def listed(max_slots):
        walker = RadixCacheWalker(real.cache, unlocked_only=False, swa_resident_only=False)
        rows = []
        while (chunk := walker.next_chunk(max_slots=max_slots)) is not None:
            plan = build_strided_sweep_plan(chunk, 4, anchor_of=lambda key: 7 if key else 0)
            anchors = [0] * plan.slots.shape[0] if plan.anchors is None else plan.anchors.tolist()
            rows += list(zip(*as_lists(plan), anchors, strict=True))
        return sorted(rows)

    whole = listed(None)
    assert len(whole) == len({row[0] for row in whole}) == (24 + 16 + 16) // 4
    assert [row[3] for row in whole].count(7) == 1
    assert listed(room) == whole


def test_a_tree_whose_pages_cut_slots_is_refused():
    walker = RadixCacheWalker(make_tree("radix", page_size=8).cache, False, False)
    walker.refuse_pages_not_of(8)
    with pytest.raises(
        UnsupportedRadixCacheError, match="stand for 128 tokens, and its pages of 8"
    ):
        walker.refuse_pages_not_of(128)


def test_what_the_walk_calls_unreachable_stays_so():
    plan = build_verify_plan_radix_sweep(walk_of([3, 4], [PREV_UNREACHABLE, 3], [8, 9]), LUT)
    assert as_lists(plan)[2] == [PREV_UNREACHABLE, 13]
    slots = range(8, 12)
    strided = build_strided_sweep_plan(walk_of(slots, [PREV_UNREACHABLE, *slots[:-1]], slots), 4)
    assert as_lists(strided) == ([2], [11], [PREV_UNREACHABLE])


@pytest.mark.parametrize("bad", [-5, 7, 1 << 40])
def test_a_slot_outside_of_the_table_is_left_for_the_check_to_report(bad):
    plan = build_verify_plan_radix_sweep(walk_of([3, bad, 4], [PREV_ANCHOR, 3, bad]), LUT)
    assert as_lists(plan) == ([13, bad, 14], [0, 1, 2], [PREV_ANCHOR, 13, bad])


def test_the_walks_tensors_are_not_changed():
    walk = walk_of([1, 2, 3], [PREV_ANCHOR, 1, 2], extra_key="lora-a")
    build_verify_plan_radix_sweep(walk, LUT)
    assert walk.slot_indices.tolist() == [1, 2, 3]
    assert walk.prev_slot_indices.tolist() == [PREV_ANCHOR, 1, 2]


def test_an_empty_chunk_gives_an_empty_plan():
    empty = RadixCacheWalker(make_tree("radix").cache, False, False).empty_result()
    for anchor_of in (None, lambda extra_key: 7):
        plan = build_verify_plan_radix_sweep(empty, LUT, anchor_of)
        assert as_lists(plan) == ([], [], [])


# -- anchors


def tree_with_namespaces():
    tree = make_tree("radix")
    for extra_key in (None, "lora-a", "lora-b"):
        tree.insert([1, 2, 3, 4], extra_key)
        tree.insert([1, 2, 5], extra_key)
    return tree


def first_namespaces(tree, walk) -> list[str | None]:
    """Namespace of the slot in each entry, None where it is not the first of its chain."""
    owners = [tree.owners[slot] for slot in walk.slot_indices.tolist()]
    return [owner.extra_key if len(owner.path) == 1 else None for owner in owners]


def test_without_anchors_a_namespaced_chain_is_not_checked_at_its_begin():
    tree = tree_with_namespaces()
    walk = walk_radix_cache_for_canary(tree.cache, False, False)
    plan = build_verify_plan_radix_sweep(walk)
    for extra_key, before, after in zip(
        first_namespaces(tree, walk),
        walk.prev_slot_indices.tolist(),
        plan.prev_slots.tolist(),
        strict=True,
    ):
        assert after == (before if extra_key is None else PREV_UNREACHABLE)
    assert plan.prev_slots.tolist().count(PREV_ANCHOR) == 1
    assert plan.prev_slots.tolist().count(PREV_UNREACHABLE) == 2


@pytest.mark.parametrize("max_slots", [None, 2, 5])
def test_anchors_stand_at_the_begin_of_each_chain(max_slots):
    anchor_of = {None: 0, "lora-a": -(1 << 63), "lora-b": (1 << 63) - 1}
    tree, starts = tree_with_namespaces(), 0
    walker = RadixCacheWalker(tree.cache, False, False)
    while (walk := walker.next_chunk(max_slots=max_slots)) is not None:
        plan = build_verify_plan_radix_sweep(walk, anchor_of=anchor_of.__getitem__)
        assert torch.equal(plan.prev_slots, walk.prev_slot_indices)
        expected = [anchor_of[extra_key] for extra_key in first_namespaces(tree, walk)]
        if any(expected):
            assert plan.anchors.dtype == torch.int64
            assert plan.anchors.tolist() == expected
        else:
            assert plan.anchors is None
        starts += plan.prev_slots.tolist().count(PREV_ANCHOR)
    assert starts == 3


# -- real trees with SWA


@pytest.mark.parametrize("kind", ["swa", "unified_swa"])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("swa_resident_only", [False, True])
def test_a_real_tree_in_the_swa_slot_space(kind, page, swa_resident_only):
    """Each SWA slot of the tree once, at its position, after its predecessor's SWA slot, and no tombstone."""
    tree = make_tree(kind, page)
    for branch in (3, 4, 5):
        tree.insert([1] * 4 + [2] * 4 + [branch] * 8)
    tree.insert([6] * 16, swa_evicted=8)
    tree.evict_swa(12)
    lut = tree.allocator.full_to_swa_index_mapping
    walk = walk_radix_cache_for_canary(tree.cache, False, swa_resident_only)
    plan = build_verify_plan_radix_sweep(walk, lut)
    swa_slots = {tree.swa_slot_of(slot): owner for slot, owner in tree.held_owners().items()}
    tombstones = sum(tree.swa_slot_of(slot) == 0 for slot in tree.held_slots())
    swa_slots.pop(0)
    rows = [row for row in zip(*as_lists(plan), strict=True) if row[0] != 0]
    assert tombstones > 0
    assert sorted(slot for slot, _, _ in rows) == sorted(swa_slots)
    assert len(plan.slots) - len(rows) == (0 if swa_resident_only else tombstones)
    unreachable = 0
    for slot, position, prev in rows:
        assert position == len(swa_slots[slot].path) - 1
        if prev == PREV_UNREACHABLE:
            unreachable += 1
        else:
            assert (position == 0) == (prev == PREV_ANCHOR)
            assert prev < 0 or swa_slots[prev].path == swa_slots[slot].path[:-1]
    assert unreachable > 0


def test_warm_up_runs_on_the_cpu():
    warm_up_sweep_plan("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_plan_never_waits_for_the_gpu():
    warm_up_sweep_plan("cuda")
    tree = tree_with_namespaces()
    host = walk_radix_cache_for_canary(tree.cache, False, False)
    walk = RadixCacheWalkResult(
        host.slot_indices.cuda(),
        host.positions.cuda(),
        host.prev_slot_indices.cuda(),
        host.segments,
    )
    lut = torch.arange(256, dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        plans = [
            build_verify_plan_radix_sweep(walk, lut),
            build_verify_plan_radix_sweep(
                walk, lut, lambda extra_key: 0 if extra_key is None else 9
            ),
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for plan, anchor_of in zip(
        plans, (None, lambda extra_key: 0 if extra_key is None else 9), strict=True
    ):
        expected = build_verify_plan_radix_sweep(host, lut.cpu(), anchor_of)
        assert as_lists(plan) == as_lists(expected)
    assert plans[1].anchors.tolist().count(9) == 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
