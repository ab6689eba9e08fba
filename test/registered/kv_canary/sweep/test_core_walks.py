"""Walks over unified trees with SGLang's core in Rust know where inserts have ended, and what they miss.

What they list is in `test_walks_of_cores.py`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.sweep import cached_ends
from sglang_kv_canary.sweep.cached_ends import CachedEnds
from sglang_kv_canary.sweep.core_walker import CoreWalker
from sglang_kv_canary.sweep.flat_walker import FlatWalker
from sglang_kv_canary.sweep.walkers import walk_radix_cache_for_canary, walker_of
from sglang_kv_canary_rigs.on_releases import TELLS_PATHS
from sglang_kv_canary_rigs.radix_fixtures import RealTree
from sglang_kv_canary_rigs.radix_walks import (
    OPERATIONS,
    blocks,
    fill,
    random_histories,
    run_history,
    tree_with_core,
    walk_in_chunks,
)

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

pytestmark = pytest.mark.skipif(
    not TELLS_PATHS,
    reason="the core in Rust tells paths from 0.5.22 on; lifted by make test SGLANG=0.5.23",
)
TREES = [("unified", 1), ("unified", 4), ("unified_swa", 1), ("unified_swa", 4)]


def tree_of(kind: str, page: int) -> tuple[RealTree, CachedEnds]:
    return tree_with_core(kind, page, "rust")


def slots_of(tree: RealTree, nodes: list[int]) -> set[int]:
    """Those of `nodes` that are still in the tree."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    core, slots = tree.cache.tree_core, set()
    for node in nodes:
        with suppress(KeyError):
            value = core.get_component_device_value(node, ComponentType.FULL)
            slots.update([] if value is None else value.tolist())
    return slots


def test_an_empty_tree_is_one_that_holds_prefixes_later() -> None:
    tree, ends = tree_of("unified", 1)
    walker = walker_of(tree.cache, ends=ends)
    first = walker.next_chunk(max_slots=1)
    assert first is not None
    assert first.num_slots == 0
    assert walker.next_chunk() is None


@pytest.mark.parametrize(
    ("kind", "page", "swa_resident_only"),
    [(*tree, False) for tree in TREES] + [("unified_swa", 1, True), ("unified_swa", 4, True)],
)
def test_random_histories(kind: str, page: int, swa_resident_only: bool) -> None:
    @random_histories
    @given(st.lists(OPERATIONS, min_size=10, max_size=60))
    def run(operations: list[tuple]) -> None:
        tree, ends = tree_of(kind, page)

        def begin() -> tuple[Any, Callable[[], set[int]]]:
            nodes = ends.begin_walk(0)
            walker = walker_of(tree.cache, False, swa_resident_only, ends=ends)
            return walker, lambda: slots_of(tree, nodes)

        run_history(tree, operations, swa_resident_only, walker_of=begin)

    run()


def test_hardly_a_slot_is_unknown_where_prefixes_come_and_go() -> None:
    """A walk after each thirty requests. Splits above nodes that have gone by then are all that it misses."""
    tree, ends = tree_of("unified", 1)
    rng, seen, held = random.Random(1), 0, 0
    for number in range(600):
        family = rng.randrange(6)
        shared = [1000 + family] * rng.randrange(12)
        assert tree.insert([*shared, *(rng.randrange(900) for _ in range(rng.randrange(1, 20)))])
        if number % 30 == 29:
            seen += walk_radix_cache_for_canary(tree.cache, ends=ends).num_slots
            held += len(tree.held_slots())
            assert not ends.is_short[False]
    assert 0.99 * held < seen <= held


def test_a_cache_that_grows_unseen_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a way into the tree that is not followed."""
    tree, ends = tree_of("unified", 1)
    assert tree.insert(blocks(1, 2, 3))
    del tree.cache.insert  # the wrapper
    assert tree.insert(blocks(7, 8, 9))
    walk_in_chunks(walker_of(tree.cache, ends=ends))
    assert isinstance(walker_of(tree.cache, ends=ends), FlatWalker)
    assert isinstance(
        walker_of(tree.cache, ends=ends), CoreWalker
    )  # until it has missed them again
    monkeypatch.setattr(cached_ends, "MOST_UNKNOWN", 0.6)  # half of them
    walk_in_chunks(walker_of(tree.cache, ends=ends))
    assert isinstance(walker_of(tree.cache, ends=ends), CoreWalker)


def test_each_walk_of_a_pass_is_followed_by_a_list() -> None:
    """A pass over a tree with a sliding window has two walks, the second one of SWA groups."""
    tree, ends = tree_of("unified_swa", 1)
    del tree.cache.insert  # the wrapper
    fill(tree)
    passes = []
    for _ in range(4):
        walkers = []
        for swa_resident_only in (False, True):
            walkers.append(walker_of(tree.cache, False, swa_resident_only, ends=ends))
            walk_in_chunks(walkers[-1])
        passes.append([type(walker) for walker in walkers])
    assert passes == [[CoreWalker] * 2, [FlatWalker] * 2] * 2


def test_slots_that_are_evicted_during_a_walk_are_not_missed() -> None:
    tree, ends = tree_of("unified", 1)
    for first in range(8):
        assert tree.insert(blocks(first, 20, 30))
    walker = walker_of(tree.cache, ends=ends)
    walker.next_chunk(max_slots=12)
    tree.evict(10_000)
    assert tree.insert(blocks(40, 41, 42))  # nor are new ones
    while walker.next_chunk() is not None:
        pass
    assert not ends.is_short[False]


def test_the_way_to_the_end_of_a_conversation_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang takes the longer for it the more turns there are."""
    tree, ends = tree_of("unified", 1)
    turns, ways = 12, []
    for turn in range(turns):
        assert tree.insert(blocks(*range(turn + 1)))
    original = tree.cache.tree_core.collect_path_info

    def collect_path_info(nodes: list[int]) -> Any:
        ways.append(nodes)
        return original(nodes)

    monkeypatch.setattr(tree.cache.tree_core, "collect_path_info", collect_path_info)
    chunks = walk_in_chunks(walker_of(tree.cache, ends=ends), max_slots=7)
    assert sum(chunk.num_slots for chunk in chunks) == len(blocks(*range(turns)))
    assert len(ways) == 1
    ways.clear()
    walker = walker_of(tree.cache, ends=ends)
    walker.next_chunk(max_slots=7)
    tree.match(blocks(*range(1))[:1])  # splits a node that is behind the walk
    tree.match([*blocks(*range(5)), 5, 90])  # and one before it
    assert len(walk_in_chunks(walker, max_slots=7)) > 1
    assert len(ways) == 2


def test_nodes_on_the_host_alone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory may hold many times as many. A stand-in for HiCache: the core says that it has no slots of a node."""
    tree, ends = tree_of("unified", 1)
    for first in range(3):
        assert tree.insert(blocks(first, 20, 30))
    core, (evicted, *_) = tree.cache.tree_core, ends.begin_walk(0)
    value = core.get_component_device_value
    on_host = lambda node, *kind: None if node == evicted else value(node, *kind)  # noqa: E731
    monkeypatch.setattr(core, "get_component_device_value", on_host)
    listed = walk_radix_cache_for_canary(tree.cache, ends=ends)
    assert listed.num_slots == 2 * len(blocks(1, 20, 30))
    assert evicted not in ends.begin_walk(0)
    monkeypatch.undo()  # a request loads it back, and has gone on
    assert tree.insert(blocks(2, 20, 30, 40))
    assert (
        set(walk_radix_cache_for_canary(tree.cache, ends=ends).slot_indices.tolist())
        == tree.held_slots()
    )


def test_few_nodes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_ends, "MOST_KNOWN", 3)
    tree, ends = tree_of("unified", 1)
    for first in range(8):
        assert tree.insert(blocks(first))
    assert len(ends) == 3
    newest = walk_radix_cache_for_canary(tree.cache, ends=ends)
    assert newest.num_slots == 3 * len(blocks(1))
    assert ends.is_short[False]


def test_what_is_inserted_again_stays_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_ends, "MOST_KNOWN", 3)
    tree, ends = tree_of("unified", 1)
    for first in (1, 2, 3, 1, 4):
        assert tree.insert(blocks(first))
    walked = walk_radix_cache_for_canary(tree.cache, ends=ends).slot_indices.tolist()
    hot = tree.cache.path_device_indices(tree.match(blocks(1)).last_device_node).tolist()
    assert len(hot) == len(blocks(1))
    assert set(hot) <= set(walked)


def test_without_inserts_that_are_followed_it_is_listed() -> None:
    tree, _ = tree_of("unified", 1)
    assert isinstance(walker_of(tree.cache), FlatWalker)
    assert isinstance(walker_of(tree.cache, ends=CachedEnds()), FlatWalker)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
