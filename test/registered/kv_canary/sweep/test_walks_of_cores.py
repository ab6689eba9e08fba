"""Unified trees of SGLang 0.5.17 and newer: nodes of the core in Python are visited, one in Rust lists its slots.

What is expected comes from the allocator and from what was written into each slot, and once from SGLang's own walk.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import PREV_UNREACHABLE
from sglang_kv_canary.sweep.flat_walker import FlatWalker
from sglang_kv_canary.sweep.radix_cache_walker import RadixCacheWalker
from sglang_kv_canary.sweep.walkers import walk_radix_cache_for_canary, walker_of
from sglang_kv_canary_rigs.on_releases import LISTS_AT_ONCE
from sglang_kv_canary_rigs.radix_fixtures import HAS_CORES, RealTree, make_tree
from sglang_kv_canary_rigs.radix_walks import (
    OPERATIONS,
    blocks,
    check_chunk,
    check_segments,
    entries,
    fill,
    random_histories,
    run_history,
    walk_in_chunks,
)

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

pytestmark = pytest.mark.skipif(
    not HAS_CORES, reason="trees have cores from 0.5.17 on; lifted by make test SGLANG=0.5.23"
)
TREES = [("unified", 1), ("unified", 4), ("unified_swa", 1), ("unified_swa", 4)]
every_tree = pytest.mark.parametrize(("kind", "page"), TREES)


def tree_of(kind: str, page: int, core: str = "python") -> RealTree:
    with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(core):
        return make_tree(kind, page)


def entries_of(tree: RealTree, swa_resident_only: bool = False) -> list[Any]:
    return sorted(entries(walk_radix_cache_for_canary(tree.cache, False, swa_resident_only)))


@every_tree
def test_nodes_are_visited(kind: str, page: int) -> None:
    tree = tree_of(kind, page)
    fill(tree)
    assert isinstance(walker_of(tree.cache), RadixCacheWalker)
    whole = walk_radix_cache_for_canary(tree.cache)
    assert set(whole.slot_indices.tolist()) == tree.held_slots()
    check_chunk(tree, whole)
    check_segments(whole)
    assert all(segment.locks == 0 for segment in whole.segments)


@every_tree
def test_it_lists_what_sglangs_own_walk_lists(kind: str, page: int) -> None:
    tree = tree_of(kind, page)
    fill(tree)
    tree.evict(2 * page)
    own = entries(tree.cache.tree_core.walk_for_kv_canary(False, False))
    # A first slot has -1 there. Its chain may start elsewhere, see `knows_anchors`
    assert entries_of(tree) == sorted((*at, PREV_UNREACHABLE if p == -1 else p) for *at, p in own)


@every_tree
def test_parts_add_up(kind: str, page: int) -> None:
    tree = tree_of(kind, page)
    fill(tree)
    whole = entries(walk_radix_cache_for_canary(tree.cache))
    chunks = walk_in_chunks(RadixCacheWalker(tree.cache, False, False), max_slots=3)
    assert [entry for chunk in chunks for entry in entries(chunk)] == whole
    tree.flush()
    assert entries_of(tree) == []


@pytest.mark.parametrize("page", [1, 4])
def test_tombstones_are_left_out(page: int) -> None:
    tree = tree_of("unified_swa", page)
    fill(tree)
    assert tree.insert(blocks(8, 9, 7, 6), swa_evicted=8)
    resident = walk_radix_cache_for_canary(tree.cache, False, swa_resident_only=True)
    check_chunk(tree, resident, swa_resident_only=True)
    held = {slot for slot in tree.held_slots() if tree.swa_slot_of(slot) > 0}
    assert set(resident.slot_indices.tolist()) == held < tree.held_slots()


@pytest.mark.parametrize(
    ("kind", "page", "swa_resident_only"),
    [(*tree, False) for tree in TREES] + [("unified_swa", 1, True), ("unified_swa", 4, True)],
)
def test_random_histories(kind: str, page: int, swa_resident_only: bool) -> None:
    @random_histories
    @given(st.lists(OPERATIONS, min_size=10, max_size=60))
    def run(operations: list[tuple]) -> None:
        run_history(tree_of(kind, page), operations, swa_resident_only)

    run()


@pytest.mark.skipif(
    not LISTS_AT_ONCE,
    reason="the core in Rust is the default from 0.5.21 on; lifted by make test SGLANG=0.5.23",
)
def test_a_core_in_rust_lists_its_slots() -> None:
    tree = tree_of("unified", 1, "rust")
    fill(tree)
    assert isinstance(walker_of(tree.cache), FlatWalker)
    listed = walk_radix_cache_for_canary(tree.cache)
    assert set(listed.slot_indices.tolist()) == tree.held_slots()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
