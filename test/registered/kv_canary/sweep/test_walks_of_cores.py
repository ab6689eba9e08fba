"""Unified trees of SGLang 0.5.17 and newer: nodes are visited. On 0.5.21 the core in Rust lists its slots.

What is expected comes from the allocator and from what was written into each slot, and once from SGLang's own walk.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import PREV_UNREACHABLE
from sglang_kv_canary.sweep.cached_ends import CachedEnds
from sglang_kv_canary.sweep.core_walker import CoreWalker
from sglang_kv_canary.sweep.flat_walker import FlatWalker
from sglang_kv_canary.sweep.radix_cache_walker import RadixCacheWalker
from sglang_kv_canary.sweep.walkers import walk_radix_cache_for_canary, walker_of
from sglang_kv_canary_rigs.on_releases import LISTS_AT_ONCE, TELLS_PATHS
from sglang_kv_canary_rigs.radix_fixtures import HAS_CORES, RealTree
from sglang_kv_canary_rigs.radix_walks import (
    OPERATIONS,
    blocks,
    check_chunk,
    check_segments,
    entries,
    fill,
    random_histories,
    run_history,
    tree_with_core,
    walk_in_chunks,
)

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

pytestmark = pytest.mark.skipif(
    not HAS_CORES, reason="trees have cores from 0.5.17 on; lifted by make test SGLANG=0.5.23"
)
TREES = [("unified", 1), ("unified", 4), ("unified_swa", 1), ("unified_swa", 4)]
every_core = pytest.mark.parametrize(
    "core",
    [
        "python",
        pytest.param(
            "rust",
            marks=pytest.mark.skipif(
                not TELLS_PATHS,
                reason="it tells paths from 0.5.22 on; lifted by make test SGLANG=0.5.23",
            ),
        ),
    ],
)
every_tree = pytest.mark.parametrize(("kind", "page"), TREES)


def entries_of(tree: RealTree, ends: CachedEnds, swa_resident_only: bool = False) -> list[Any]:
    walk = walk_radix_cache_for_canary(tree.cache, False, swa_resident_only, ends)
    return sorted(entries(walk))


@every_core
@every_tree
def test_nodes_are_visited(kind: str, page: int, core: str) -> None:
    tree, ends = tree_with_core(kind, page, core)
    fill(tree)
    expected = {"python": RadixCacheWalker, "rust": CoreWalker}[core]
    assert isinstance(walker_of(tree.cache, ends=ends), expected)
    whole = walk_radix_cache_for_canary(tree.cache, ends=ends)
    assert set(whole.slot_indices.tolist()) == tree.held_slots()
    check_chunk(tree, whole)
    check_segments(whole)
    # The core in Rust does not tell who uses a node
    assert {segment.locks for segment in whole.segments} == {0 if core == "python" else None}
    assert len({segment.node for segment in whole.segments}) == len(whole.segments)


@every_core
@every_tree
def test_it_lists_what_sglangs_own_walk_lists(kind: str, page: int, core: str) -> None:
    tree, ends = tree_with_core(kind, page, core)
    fill(tree)
    tree.evict(2 * page)
    own = entries(tree.cache.tree_core.walk_for_kv_canary(False, False))
    # A first slot has -1 there. Its chain may start elsewhere, see `knows_anchors`
    expected = sorted((*at, PREV_UNREACHABLE if p == -1 else p) for *at, p in own)
    assert entries_of(tree, ends) == expected


@every_core
@every_tree
def test_parts_add_up(kind: str, page: int, core: str) -> None:
    tree, ends = tree_with_core(kind, page, core)
    fill(tree)
    whole = entries(walk_radix_cache_for_canary(tree.cache, ends=ends))
    for limits in ({"max_slots": 3}, {"max_us": 1.0}):
        chunks = walk_in_chunks(walker_of(tree.cache, ends=ends), **limits)
        assert [entry for chunk in chunks for entry in entries(chunk)] == whole
        assert len(chunks) > 3
    tree.flush()
    assert entries_of(tree, ends) == []
    assert len(ends) == 0  # they have left the cache


@every_core
@pytest.mark.parametrize("page", [1, 4])
def test_tombstones_are_left_out(page: int, core: str) -> None:
    tree, ends = tree_with_core("unified_swa", page, core)
    fill(tree)
    assert tree.insert(blocks(8, 9, 7, 6), swa_evicted=8)
    resident = walk_radix_cache_for_canary(tree.cache, False, swa_resident_only=True, ends=ends)
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
        run_history(tree_with_core(kind, page, "python")[0], operations, swa_resident_only)

    run()


@pytest.mark.skipif(
    not LISTS_AT_ONCE,
    reason="the core in Rust is the default from 0.5.21 on; lifted by make test SGLANG=0.5.23",
)
def test_a_core_in_rust_lists_its_slots() -> None:
    tree, _ = tree_with_core("unified", 1, "rust")
    fill(tree)
    assert isinstance(walker_of(tree.cache), FlatWalker)
    listed = walk_radix_cache_for_canary(tree.cache)
    assert set(listed.slot_indices.tolist()) == tree.held_slots()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
