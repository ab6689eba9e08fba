"""A damaged prefix leaves SGLang's real trees: out of reach at once, freed when nobody holds it, and nothing leaks."""

from __future__ import annotations

import inspect
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.sweep.walkers import walk_radix_cache_for_canary
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.radix_fixtures import POOL_SLOTS, RealTree, make_tree

if release().has_own_canary:
    pytest.skip("actions run on 0.5.12.post1 only", allow_module_level=True)

from sglang_kv_canary.wiring.containment.withheld_slots import (
    MOST_WITHHELD,
    WithheldSlots,
    allocators_by_kind,
)
from sglang_kv_canary.wiring.v0_5_12.cached_prefixes import CachedPrefixes
from sglang_kv_canary.wiring.v0_5_12.hicached_prefixes import HiCachedPrefixes
from sglang_kv_canary.wiring.v0_5_12.prefixes import NoPrefixes, prefixes_of

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

TREES = [
    ("radix", 1),
    ("radix", 4),
    ("radix_eagle", 1),
    ("swa", 1),
    ("swa", 4),
    ("hiradix", 1),
    ("hiradix", 4),
]
every_tree = pytest.mark.parametrize(("kind", "page"), TREES)
SHARED = list(range(100, 116))


def prompt(*ends: int) -> list[int]:
    return SHARED + [token for end in ends for token in range(10 * end, 10 * end + 8)]


def sizes(tree: RealTree) -> tuple[int, int, int]:
    """Available, evictable and protected slots of the full pool, as SGLang's leak check takes them."""
    if tree.has_swa:
        cache, free = tree.cache, tree.allocator.full_available_size()
        return free, cache.full_evictable_size(), cache.full_protected_size()
    return (
        tree.allocator.available_size(),
        tree.cache.evictable_size(),
        tree.cache.protected_size(),
    )


def assert_accounted(tree: RealTree) -> None:
    assert sum(sizes(tree)) == POOL_SLOTS
    if (
        tree.has_swa and not tree.cache.full_protected_size()
    ):  # SGLang's own check is for an idle server
        tree.cache.sanity_check()


def cached(tree: RealTree, tokens: list[int]) -> list[int]:
    return tree.match(tokens).device_indices.tolist()


@every_tree
def test_nobody_gets_a_dropped_prefix_and_its_slots_are_free(kind: str, page: int) -> None:
    tree = make_tree(kind, page)
    for ends in ((1,), (1, 2), (3,)):
        assert tree.insert(prompt(*ends, 9))
    prefixes = prefixes_of(tree.cache)
    whole, other = cached(tree, prompt(1, 2, 9)), cached(tree, prompt(3, 9))
    at = len(SHARED) + page
    assert prefixes.drop([whole[at]]) >= len(whole) - at
    shared = len(SHARED) - (kind == "radix_eagle")  # bigrams
    assert cached(tree, prompt(1, 2, 9)) == whole[:shared]
    assert cached(tree, prompt(3, 9)) == other
    assert whole[at] not in tree.held_slots()
    assert prefixes.num_held == 0
    assert_accounted(tree)


@every_tree
def test_a_prefix_that_is_held_is_freed_with_its_last_holder(kind: str, page: int) -> None:
    tree = make_tree(kind, page)
    tree.insert(prompt(1, 9))
    first, second = tree.lock(prompt(1, 9)), tree.lock(prompt(1, 9))
    prefixes = prefixes_of(tree.cache)
    whole = cached(tree, prompt(1, 9))
    prefixes.drop([whole[0]])
    assert cached(tree, prompt(1, 9)) == []
    assert prefixes.num_held == len(whole)
    assert prefixes.holds(SimpleNamespace(last_node=first.node))
    tree.insert(prompt(1, 9))  # computed again
    again = cached(tree, prompt(1, 9))
    assert not set(again) & set(whole)
    walked = walk_radix_cache_for_canary(tree.cache).slot_indices.tolist()
    assert sorted(walked) == sorted(again)  # the sweep does not find the same damage for ever
    assert_accounted(tree)
    tree.unlock(first)
    prefixes.free_unheld()
    assert prefixes.num_held == len(whole)
    tree.unlock(second)
    prefixes.free_unheld()
    assert prefixes.num_held == 0
    assert tree.held_slots() == set(again)
    assert_accounted(tree)


def test_a_deep_tree_is_freed() -> None:
    """A conversation of many turns is a chain of as many nodes."""
    tree, limit = make_tree("radix"), sys.getrecursionlimit()
    for end in range(1, 91):
        tree.insert(range(end))
    prefixes, whole = prefixes_of(tree.cache), cached(tree, list(range(90)))
    sys.setrecursionlimit(len(inspect.stack()) + 50)
    try:
        assert prefixes.drop(whole[:1]) == 90
    finally:
        sys.setrecursionlimit(limit)
    assert sizes(tree) == (POOL_SLOTS, 0, 0)


@every_tree
def test_a_flush_and_an_eviction_free_it_only_once(kind: str, page: int) -> None:
    tree = make_tree(kind, page)
    prefixes = prefixes_of(tree.cache)
    for free in (lambda: tree.evict(POOL_SLOTS), tree.flush):
        tree.insert(prompt(1, 9))
        lock = tree.lock(prompt(1, 9))
        prefixes.drop(cached(tree, prompt(1, 9))[:1])
        tree.unlock(lock)
        free()
        assert prefixes.num_held in (0, len(prompt(1, 9)) // page * page, len(prompt(1, 9)) - 1)
        prefixes.free_unheld()
        assert prefixes.num_held == 0
        assert sizes(tree) == (POOL_SLOTS, 0, 0)


@every_tree
def test_random_histories(kind: str, page: int) -> None:
    """Insertions, locks, evictions and drops in any order: what is dropped is never handed to anybody."""
    for seed in range(6):
        rng, tree, locks = random.Random(seed), make_tree(kind, page), []
        prefixes = prefixes_of(tree.cache)
        for _ in range(60):
            tokens = prompt(*(rng.randrange(1, 4) for _ in range(rng.randrange(1, 4))))
            act = rng.randrange(8 if kind == "hiradix" else 6)
            if act <= 1:
                tree.insert(tokens)
            elif act == 2 and len(locks) < 3 and cached(tree, tokens):
                locks.append(tree.lock(tokens))
            elif act == 3 and locks:
                tree.unlock(locks.pop(rng.randrange(len(locks))))
                prefixes.free_unheld()  # at the next step boundary
            elif act == 4:
                tree.evict(rng.randrange(1, 30))
            elif act == 6:
                tree.load_back(tokens)
            elif act == 7:
                tree.cache.evict_host(rng.randrange(1, 30))
            elif slots := cached(tree, tokens):
                bad = rng.choice(slots)
                prefixes.drop([bad])
                assert bad not in cached(tree, tokens)
            assert_accounted(tree)
        for lock in locks:
            tree.unlock(lock)
        prefixes.free_unheld()
        assert prefixes.num_held == 0
        tree.evict(POOL_SLOTS)
        assert sizes(tree) == (POOL_SLOTS, 0, 0)
        if kind == "hiradix":
            tree.cache.evict_host(10_000)
            assert not tree.cache.cache_controller.held
            assert not tree.cache.root_node.children


@every_tree
def test_the_slots_of_a_finished_request_are_found_by_its_tokens(kind: str, page: int) -> None:
    tree = make_tree(kind, page)
    tokens = prompt(1, 2)
    tree.insert(tokens)
    whole = cached(tree, tokens)
    request = SimpleNamespace(origin_input_ids=tokens[:20], output_ids=tokens[20:], extra_key=None)
    assert prefixes_of(tree.cache).slots_of(request, 0) == whole
    assert prefixes_of(tree.cache).slots_of(request, 19) == whole[19:]
    request.extra_key = "lora-a"
    assert prefixes_of(tree.cache).slots_of(request, 0) == []


def test_other_caches_are_known_or_told_apart() -> None:
    assert isinstance(prefixes_of(make_tree("radix").cache), CachedPrefixes)
    assert isinstance(prefixes_of(make_tree("radix", disable=True).cache), NoPrefixes)
    assert isinstance(prefixes_of(make_tree("hiradix").cache), HiCachedPrefixes)
    for kind in ("mamba", "unified_swa"):
        assert prefixes_of(make_tree(kind).cache) is None


def free_slots(allocator: Any) -> set[int]:
    pages = [*allocator.free_pages.tolist(), *allocator.release_pages.tolist()]
    return {page * allocator.page_size for page in pages}


@pytest.mark.parametrize(("kind", "page"), [("radix", 1), ("radix", 4), ("swa", 1), ("swa", 4)])
def test_a_withheld_slot_is_never_handed_out_again(kind: str, page: int) -> None:
    tree = make_tree(kind, page)
    allocators = allocators_by_kind(tree.allocator)
    withheld = WithheldSlots(allocators)
    for pool, allocator in allocators.items():
        size = allocator.available_size()
        bad = 7 * page
        tree.insert(prompt(1))  # the slot may be in use
        withheld.take_from_free_lists()
        assert withheld.withhold(pool, bad + page - 1)
        assert not withheld.withhold(pool, bad)  # the same page
        withheld.take_from_free_lists()
        tree.flush()  # SGLang's free list is complete again
        withheld.after_clear(allocator)
        assert free_slots(allocator) == {p * page for p in range(1, size // page + 1)} - {bad}
        assert allocator.available_size() + withheld.counts()[pool] == size
    assert not withheld.withhold("C4", 5)  # no allocator of its own


def test_a_slot_in_use_is_withheld_when_it_is_freed() -> None:
    tree = make_tree("radix")
    withheld = WithheldSlots(allocators_by_kind(tree.allocator))
    tree.insert(prompt(1))
    slot = cached(tree, prompt(1))[3]
    withheld.withhold("FULL", slot)
    withheld.take_from_free_lists()
    assert withheld.counts() == {}
    tree.evict(POOL_SLOTS)
    assert slot in free_slots(tree.allocator)
    withheld.take_from_free_lists()
    assert slot not in free_slots(tree.allocator)
    assert withheld.counts() == {"FULL": 1}


def test_damage_everywhere_does_not_starve_the_server() -> None:
    tree = make_tree("radix")
    withheld = WithheldSlots(allocators_by_kind(tree.allocator))
    taken = sum(withheld.withhold("FULL", slot) for slot in range(1, POOL_SLOTS))
    assert taken == POOL_SLOTS // 64 < MOST_WITHHELD


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
