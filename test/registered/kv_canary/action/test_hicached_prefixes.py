"""A damaged prefix leaves HiCache: device, host memory and storage, whatever copies it at that moment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.radix_fixtures import POOL_SLOTS, RealTree, make_tree

if release().has_own_canary:
    pytest.skip("actions run with HiCache on 0.5.12.post1 only", allow_module_level=True)

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_hash_values, get_hash_str
from sglang_kv_canary.wiring.containment.prefixes import Computed
from sglang_kv_canary.wiring.v0_5_12 import hicached_prefixes
from sglang_kv_canary.wiring.v0_5_12.hicached_prefixes import (
    HiCachedPrefixes,
    _keys_behind,
    around_store_node,
)
from sglang_kv_canary.wiring.v0_5_12.prefixes import prefixes_of

register_cpu_ci(est_time=4, suite="stage-a-test-cpu")

SHARED = list(range(100, 116))
FIRST, SECOND = [*SHARED, *range(8)], [*SHARED, *range(20, 28)]


class Records:
    """Of host memory: which slots have lost theirs."""

    def __init__(self) -> None:
        self.cleared: set[int] = set()

    def clear(self, slots: torch.Tensor) -> None:
        self.cleared.update(slots.tolist())


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    records = Records()
    monkeypatch.setattr(context, "host_tier", SimpleNamespace(records=records))
    idle = SimpleNamespace(after_clear=lambda allocator: None, before_eviction=lambda: None)
    monkeypatch.setattr(context, "containment", idle)
    return records


@pytest.fixture
def tree(records: Records) -> RealTree:
    tree = make_tree("hiradix", 4)
    tree.insert(FIRST)
    tree.insert(SECOND)
    return tree


@pytest.fixture
def prefixes(tree: RealTree) -> HiCachedPrefixes:
    return prefixes_of(tree.cache)


@pytest.fixture
def copying(tree: RealTree) -> Iterator[RealTree]:
    """The tree, whose copies do not end by themselves."""
    finish, tree._finish_host_copies = tree._finish_host_copies, lambda: None
    yield tree
    finish()


def node_of(tree: RealTree, tokens: list[int]) -> Any:
    return tree.match(tokens).best_match_node


def hits(tree: RealTree, tokens: list[int]) -> int:
    """Tokens that a request would get, from the device and from host memory."""
    match = tree.match(tokens)
    return len(match.device_indices) + match.host_hit_length


def host_slots(tree: RealTree) -> set[int]:
    return tree.cache.cache_controller.held


def device_sizes(tree: RealTree) -> tuple[int, int, int]:
    cache = tree.cache
    return tree.allocator.available_size(), cache.evictable_size(), cache.protected_size()


def test_it_leaves_the_device_and_host_memory(tree, prefixes, records) -> None:
    gone = set(node_of(tree, FIRST).host_value.tolist())
    slot = int(tree.match(FIRST).device_indices[-1])
    assert prefixes.drop([slot]) == 8
    assert (hits(tree, FIRST), hits(tree, SECOND)) == (16, 24)
    assert records.cleared == gone
    assert not host_slots(tree) & gone
    assert len(host_slots(tree)) == 24
    assert device_sizes(tree) == (POOL_SLOTS - 24, 24, 0)


def test_what_is_in_host_memory_only_is_found_by_its_tokens(tree, prefixes) -> None:
    tree.evict(POOL_SLOTS)
    assert hits(tree, FIRST) == 24
    assert prefixes.drop([], [Computed([*FIRST, 7], None, 18)]) == 8
    assert (hits(tree, FIRST), hits(tree, SECOND)) == (16, 24)
    assert prefixes.drop([], [Computed(SECOND, None, 3)]) == 24
    assert (hits(tree, SECOND), host_slots(tree)) == (0, set())


@pytest.mark.parametrize(
    "computed", [Computed(FIRST, "lora", 0), Computed(FIRST, None, 24), Computed([7], None, 0)]
)
def test_what_others_have_computed_stays(tree, prefixes, records, computed: Computed) -> None:
    assert prefixes.drop([], [computed]) == 0
    assert (hits(tree, FIRST), hits(tree, SECOND)) == (24, 24)
    assert not records.cleared


def test_a_part_on_the_device_leads_to_a_part_in_host_memory(tree, prefixes) -> None:
    """The tree evicts leaves first. What is below a damaged slot goes with it."""
    tree.evict(16)
    match = tree.match(FIRST)
    assert (len(match.device_indices), match.host_hit_length) == (16, 8)
    assert prefixes.drop([int(match.device_indices[0])]) == 32
    assert (hits(tree, FIRST), host_slots(tree)) == (0, set())
    assert device_sizes(tree) == (POOL_SLOTS, 0, 0)


def test_everything_is_dropped(tree, prefixes) -> None:
    tree.evict(16)
    assert prefixes.drop(None) == 32
    assert (hits(tree, FIRST), hits(tree, SECOND), host_slots(tree)) == (0, 0, set())


def test_a_copy_to_host_memory_is_awaited_and_goes_to_no_storage(copying, prefixes) -> None:
    tree, tokens = copying, list(range(50, 62))
    tree.insert(tokens)
    node = node_of(tree, tokens)
    assert prefixes.drop([int(node.value[0])]) == 12
    assert hits(tree, tokens) == 0
    prefixes.free_unheld()
    assert (prefixes.num_held, prefixes.has_unheld()) == (12, False)
    stored: list[Any] = []
    around_store_node(lambda tree, node: stored.append(node), tree.cache, node)
    around_store_node(lambda tree, node: stored.append(node), tree.cache, node_of(tree, FIRST))
    assert stored == [node_of(tree, FIRST)]
    tree.cache.dec_lock_ref(tree.cache.ongoing_write_through.pop(node.id))  # it has ended
    assert prefixes.has_unheld()
    prefixes.free_unheld()
    assert (prefixes.num_held, len(host_slots(tree))) == (0, 32)
    assert device_sizes(tree) == (POOL_SLOTS - 32, 32, 0)


def test_a_load_from_host_memory_is_awaited(
    copying, prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots would be handed to another request while the copy still writes them."""
    tree = copying
    tree.evict(POOL_SLOTS)
    with monkeypatch.context() as without_records:  # which would shorten it
        without_records.setattr(context, "host_tier", None)
        assert tree.load_back(FIRST)
    loaded = set(tree.match(FIRST).device_indices.tolist())
    prefixes.drop([], [Computed(FIRST, None, 0)])
    assert hits(tree, FIRST) == 0
    prefixes.free_unheld()
    assert loaded <= tree.held_slots()
    assert len(host_slots(tree)) == 24
    tree.cache.dec_lock_ref(tree.cache.ongoing_load_back.popitem()[1])
    prefixes.free_unheld()
    assert (tree.held_slots(), host_slots(tree)) == (set(), set())


def test_a_page_that_storage_reads_keeps_its_place(tree, prefixes) -> None:
    node = node_of(tree, FIRST)
    node.protect_host()
    prefixes.drop([int(node.value[0])])
    assert set(node.host_value.tolist()) <= host_slots(tree)
    assert node.evicted  # the device does not wait
    tree.evict(POOL_SLOTS)
    assert device_sizes(tree) == (POOL_SLOTS, 0, 0)
    node.release_host()
    prefixes.free_unheld()
    assert not set(node.host_value.tolist()) & host_slots(tree)


def test_what_a_prefetch_adds_below_it_goes_with_it(tree, prefixes) -> None:
    """A prefetch from storage continues a node, and adds its pages when the node has been dropped."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    node = node_of(tree, FIRST)
    node.protect_host()
    prefixes.drop([int(node.value[0])])
    fetched = tree.cache.cache_controller.write(torch.arange(4), 0)
    tree.cache._insert_helper_host(node, RadixKey([1, 2, 3, 4]), fetched, ["key"])
    assert hits(tree, [*FIRST, 1, 2, 3, 4]) == 16
    node.release_host()
    prefixes.free_unheld()
    assert (prefixes.num_held, len(host_slots(tree))) == (0, 24)


class Store:
    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def forget(self, keys: list[str]) -> None:
        self.forgotten += keys


def keys_of(tokens: list[int]) -> list[str]:
    keys: list[str] = []
    for first in range(0, len(tokens) // 4 * 4, 4):
        keys.append(get_hash_str(tokens[first : first + 4], keys[-1] if keys else None))
    return keys


def test_storage_forgets_what_is_dropped_and_what_was_computed(
    tree, prefixes, records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also pages that neither device nor host memory still have, and those that are on their way."""
    store = Store()
    monkeypatch.setattr(hicached_prefixes, "store_of", lambda controller: store)
    tree.flush()
    tree.cache.enable_storage = True
    tree.insert(FIRST)
    tree.insert([*FIRST, 1, 2, 3, 4])
    other = list(range(200, 220))
    fetched, keys = torch.arange(1000, 1020), keys_of(other)
    operation = SimpleNamespace(hash_value=keys[:4])
    tree.cache.ongoing_prefetch["r"] = (tree.cache.root_node, None, fetched, operation)
    slot = int(tree.match([*FIRST, 1, 2, 3, 4]).device_indices[-1])
    prefixes.drop([slot], [Computed([*other, 1], None, 10)])
    assert store.forgotten == [keys_of([*FIRST, 1, 2, 3, 4])[-1], *keys[2:]]
    assert {slot for slot in records.cleared if slot >= 1000} == set(range(1008, 1016))


def test_a_long_prefix_that_is_right_is_not_hashed_again(
    tree, prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reader of it would, on the scheduler's thread."""
    store, hashed = Store(), []
    monkeypatch.setattr(hicached_prefixes, "store_of", lambda controller: store)
    tree.flush()
    tree.cache.enable_storage = True
    tree.insert(FIRST)
    tree.insert(SECOND)
    longer = [*FIRST, 1, 2, 3, 4, 5, 6, 7, 8]
    hash_page = RadixKey.hash_page
    monkeypatch.setattr(RadixKey, "hash_page", lambda *a: hashed.append(a) or hash_page(*a))
    assert prefixes.drop([], [Computed(longer, None, 24)]) == 0
    assert store.forgotten == keys_of(longer)[6:]
    assert len(hashed) == 2
    assert hits(tree, FIRST) == 24
    store.forgotten.clear()
    branch = [*FIRST[:20], *range(60, 68)]  # it ends in the middle of a node
    assert prefixes.drop([], [Computed(branch, None, 22)]) == 0
    assert store.forgotten == keys_of(branch)[5:]
    store.forgotten.clear()
    assert prefixes.drop([], [Computed(longer, None, 21)]) == 8
    assert sorted(store.forgotten) == sorted(keys_of(longer)[5:] + keys_of(longer)[4:5])


@pytest.mark.parametrize("pairs", [False, True])
def test_keys_in_storage_are_those_of_sglang(tree, pairs: bool) -> None:
    """EAGLE's tree counts pairs of tokens, so its keys differ."""
    cache = SimpleNamespace(page_size=4, is_eagle=pairs)
    tokens = FIRST[: 20 + pairs]
    node = SimpleNamespace(key=RadixKey(tokens, is_bigram=pairs), parent=None, hash_value=None)
    theirs = compute_node_hash_values(node, 4)
    assert len(theirs) == 5
    assert (theirs == keys_of(tokens)) != pairs
    assert list(_keys_behind(Computed(tokens, None, 0), cache)) == theirs
    assert list(_keys_behind(Computed(tokens, None, 9), cache, 8, theirs[1])) == theirs[2:]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
