"""The walk lists what the prefix cache holds: every slot, its position, its predecessor, and nothing stale.

What is expected does not come from the tree: the allocator says which slots are held, and the fixture remembers the
token path that each slot was written with. So position and predecessor are checked as the canary's chain would.
"""

import ast
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import PREV_UNREACHABLE
from sglang_kv_canary.sweep import radix_cache_walker
from sglang_kv_canary.sweep.chunk import Gatherer
from sglang_kv_canary.sweep.radix_cache_walker import (
    RadixCacheWalker,
    UnsupportedRadixCacheError,
)
from sglang_kv_canary.sweep.walkers import walk_radix_cache_for_canary
from sglang_kv_canary_rigs.radix_fixtures import PAGED_TREE_KINDS, TREE_KINDS, make_tree
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

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

TREES = [(kind, 1) for kind in TREE_KINDS] + [(kind, 4) for kind in PAGED_TREE_KINDS]
SWA_TREES = [(kind, page) for kind, page in TREES if kind in ("swa", "unified_swa")]
every_tree = pytest.mark.parametrize(("kind", "page"), TREES)
every_swa_tree = pytest.mark.parametrize(("kind", "page"), SWA_TREES)


@every_tree
def test_a_walk_lists_every_slot_of_the_tree(kind, page):
    tree = make_tree(kind, page)
    fill(tree)
    result = walk_radix_cache_for_canary(tree.cache, unlocked_only=False, swa_resident_only=False)
    assert sorted(result.slot_indices.tolist()) == sorted(tree.held_slots())
    check_chunk(tree, result)
    check_segments(result)
    assert {segment.extra_key for segment in result.segments} == {None, "lora-a"}


@every_tree
@pytest.mark.parametrize("max_slots", [1, 3, 7])
def test_chunks_add_up_to_the_whole_walk(kind, page, max_slots):
    tree = make_tree(kind, page)
    fill(tree)
    whole = walk_radix_cache_for_canary(tree.cache, False, False)
    chunks = walk_in_chunks(RadixCacheWalker(tree.cache, False, False), max_slots=max_slots)
    assert [e for chunk in chunks for e in entries(chunk)] == entries(whole)
    assert all(chunk.num_slots == max_slots for chunk in chunks[:-1])
    for chunk in chunks:
        check_segments(chunk)


def test_results_are_int64_on_the_trees_device():
    tree = make_tree("radix")
    fill(tree)
    for result in (
        walk_radix_cache_for_canary(tree.cache, False, False),
        RadixCacheWalker(tree.cache, False, False).empty_result(),
    ):
        for tensor in (result.slot_indices, result.positions, result.prev_slot_indices):
            assert tensor.dtype == torch.int64
            assert tensor.device == tree.cache.device


@every_tree
def test_unlocked_only_leaves_out_what_a_request_uses(kind, page):
    tree = make_tree(kind, page)
    fill(tree)
    prompt = blocks(1, 2, 3, 50)
    lock = tree.lock(prompt)
    in_use = set(tree.match(prompt).device_indices.tolist())
    assert in_use
    result = walk_radix_cache_for_canary(tree.cache, unlocked_only=True, swa_resident_only=False)
    assert set(result.slot_indices.tolist()) == tree.held_slots() - in_use
    assert set(walk_radix_cache_for_canary(tree.cache).slot_indices.tolist()) == tree.held_slots()
    check_chunk(tree, result)  # a child of a locked node still has the locked node's slot before it
    assert any(prev in in_use for _, _, prev in entries(result))
    tree.unlock(lock)
    result = walk_radix_cache_for_canary(tree.cache, unlocked_only=True, swa_resident_only=False)
    assert set(result.slot_indices.tolist()) == tree.held_slots()


def make_tombstones(tree) -> set[int]:
    """Full slots whose SWA slots are gone, while the tree still holds them."""
    fill(tree)
    tree.insert(blocks(8, 9, 10, 11), swa_evicted=4)
    tree.evict_swa(8)
    return {slot for slot in tree.held_slots() if tree.swa_slot_of(slot) == 0}


@every_swa_tree
def test_swa_resident_only_leaves_out_tombstones(kind, page):
    tree = make_tree(kind, page)
    gone = make_tombstones(tree)
    assert gone
    result = walk_radix_cache_for_canary(tree.cache, unlocked_only=False, swa_resident_only=True)
    assert set(result.slot_indices.tolist()) == tree.held_slots() - gone
    check_chunk(tree, result, swa_resident_only=True)
    assert PREV_UNREACHABLE in result.prev_slot_indices.tolist()
    everything = walk_radix_cache_for_canary(tree.cache, False, swa_resident_only=False)
    assert set(everything.slot_indices.tolist()) == tree.held_slots()
    check_chunk(tree, everything)


@pytest.mark.parametrize("kind", ["radix", "mamba", "unified", "unified_mamba", "hiradix"])
def test_without_swa_every_node_counts_as_resident(kind):
    tree = make_tree(kind)
    fill(tree)
    result = walk_radix_cache_for_canary(tree.cache, False, swa_resident_only=True)
    assert set(result.slot_indices.tolist()) == tree.held_slots()


def test_nodes_that_are_only_on_the_host_are_skipped():
    tree = make_tree("hiradix")
    fill(tree)
    before = tree.held_slots()
    prompt = blocks(1, 2, 4, 5, 50)
    tree.evict(10**6)
    assert not tree.held_slots()
    assert walk_radix_cache_for_canary(tree.cache, False, False).num_slots == 0
    assert tree.load_back(prompt)
    result = walk_radix_cache_for_canary(tree.cache, False, False)
    assert set(result.slot_indices.tolist()) == tree.held_slots()
    assert len(before) > result.num_slots == len(prompt)
    check_chunk(tree, result)


@pytest.mark.parametrize("class_name", ["ChunkCache", "SWAChunkCache"])
def test_chunk_caches_have_nothing_to_walk(class_name):
    from sglang.srt.mem_cache import chunk_cache

    tree = make_tree("swa")
    params = SimpleNamespace(
        req_to_token_pool=tree.cache.req_to_token_pool,
        token_to_kv_pool_allocator=tree.allocator,
        page_size=1,
        sliding_window_size=8,
        chunked_prefill_size=16,
    )
    cache = getattr(chunk_cache, class_name)(params)
    assert RadixCacheWalker(cache, False, False).next_chunk(max_slots=4) is None
    assert walk_radix_cache_for_canary(cache, False, False).num_slots == 0


@every_tree
def test_an_empty_or_disabled_tree_has_nothing_to_walk(kind, page):
    for disable in (False, True):
        tree = make_tree(kind, page, disable=disable)
        assert walk_radix_cache_for_canary(tree.cache, False, False).num_slots == 0


def test_a_streaming_session_is_looked_through():
    from sglang.srt.session.streaming_session import StreamingSession

    tree = make_tree("radix")
    fill(tree)
    result = walk_radix_cache_for_canary(StreamingSession(tree.cache), False, False)
    assert set(result.slot_indices.tolist()) == tree.held_slots()


@pytest.mark.parametrize(
    "limits", [{"max_slots": 0}, {"max_slots": -1}, {"max_us": 0}, {"max_us": -0.5}]
)
def test_limits_that_are_not_positive_are_refused(limits):
    with pytest.raises(ValueError, match="positive"):
        RadixCacheWalker(make_tree("radix").cache, False, False).next_chunk(**limits)


# -- every prefix cache that the installed SGLang has


def prefix_cache_classes() -> dict[str, tuple[str, list[str]]]:
    """Class name -> (module, base names) of every BasePrefixCache subclass in SGLang's sources."""
    sources = Path(importlib.util.find_spec("sglang.srt.mem_cache.radix_cache").origin).parents[1]
    classes = {}
    for folder in ("mem_cache", "session"):
        for path in sources.joinpath(folder).rglob("*.py"):
            module = ".".join(("sglang", "srt", *path.relative_to(sources).with_suffix("").parts))
            for item in ast.walk(ast.parse(path.read_text())):
                if isinstance(item, ast.ClassDef):
                    bases = [base.id for base in item.bases if isinstance(base, ast.Name)]
                    classes.setdefault(item.name, (module, bases))

    def is_prefix_cache(name: str) -> bool:
        bases = classes.get(name, ("", []))[1]
        return "BasePrefixCache" in bases or any(is_prefix_cache(base) for base in bases)

    return {name: found for name, found in classes.items() if is_prefix_cache(name)}


def stand_in(name: str, classes: dict[str, tuple[str, list[str]]]) -> type:
    """A class with SGLang's name and bases: the C++ tree compiles when imported, LMCache is another package."""
    module, bases = classes[name]
    parents = tuple(stand_in(base, classes) for base in bases if base in classes)
    return type(name, parents, {"__module__": module})


def test_every_prefix_cache_of_sglang_is_walked_or_refused_by_name():
    classes = prefix_cache_classes()
    assert {"RadixCache", "SWARadixCache", "HiMambaRadixCache", "RadixCacheCpp"} <= set(classes)
    refused = {}
    for name in set(classes) - {"StreamingSession"}:
        cache = stand_in(name, classes)()
        cache.device, cache.page_size, cache.tree_components = "cpu", 1, ()
        cache.root_node = SimpleNamespace(children={})
        try:
            RadixCacheWalker(cache, False, False)
        except UnsupportedRadixCacheError as error:
            refused[name] = str(error)
    assert set(refused) == {"RadixCacheCpp"}
    for name, message in refused.items():
        assert name in message
        assert "start without --kv-canary-sweep-interval" in message


def test_an_unknown_prefix_cache_is_refused_with_the_known_ones():
    class MyTree:
        pass

    with pytest.raises(UnsupportedRadixCacheError, match=r"MyTree.*RadixCache, SWARadixCache"):
        RadixCacheWalker(MyTree(), False, False)


# -- the tree changes between chunks


@every_tree
def test_a_flush_ends_the_pass(kind, page):
    tree = make_tree(kind, page)
    fill(tree)
    walker = RadixCacheWalker(tree.cache, False, False)
    assert walker.next_chunk(max_slots=5).num_slots == 5
    tree.flush()
    tree.insert(blocks(1, 2, 3))
    assert walker.next_chunk(max_slots=5) is None
    assert walker.next_chunk() is None


@every_tree
@pytest.mark.parametrize(("split_after", "cut_at"), [(1, 6), (2, 6), (1, 4), (3, 14), (4, 3)])
def test_a_node_that_is_split_while_cut_is_neither_repeated_nor_lost(
    kind, page, split_after, cut_at
):
    tree = make_tree(kind, page)
    tree.insert(blocks(1, 2, 3, 4, 5))
    expected = entries(walk_radix_cache_for_canary(tree.cache, False, False))
    walker = RadixCacheWalker(tree.cache, False, False)
    got = entries(walker.next_chunk(max_slots=cut_at))
    tree.insert(blocks(*range(1, split_after + 1), 60, 61))
    assert len(walk_radix_cache_for_canary(tree.cache, False, False).segments) > 1
    for chunk in walk_in_chunks(walker, max_slots=3):
        check_chunk(tree, chunk)
        got += entries(chunk)
    assert set(expected) <= set(got)
    assert len(got) == len(set(got)), "a slot was repeated"


@every_tree
def test_evicted_slots_do_not_come_up(kind, page):
    tree = make_tree(kind, page)
    fill(tree)
    walker = RadixCacheWalker(tree.cache, False, False)
    walker.next_chunk(max_slots=2)  # cuts a node
    tree.evict(10**6)
    assert not tree.held_slots()
    tree.insert(blocks(70, 71))  # takes slots that were just freed
    for chunk in walk_in_chunks(walker):
        check_chunk(tree, chunk)


def test_a_walk_does_not_change_the_tree():
    tree = make_tree("radix")
    fill(tree)
    walker = RadixCacheWalker(tree.cache, False, False)
    walker.next_chunk(max_slots=1)
    tree.evict(10**6)
    walk_in_chunks(walker)
    assert not tree.cache.root_node.children


@every_tree
def test_a_time_limit_that_has_passed_still_makes_progress(kind, page):
    tree = make_tree(kind, page)
    fill(tree)
    chunks = walk_in_chunks(RadixCacheWalker(tree.cache, False, False), max_us=1)
    assert all(len(chunk.segments) <= 1 for chunk in chunks)
    whole = walk_radix_cache_for_canary(tree.cache, False, False)
    assert [e for chunk in chunks for e in entries(chunk)] == entries(whole)


@pytest.mark.parametrize("insert_every", [0, 2])
def test_very_many_children_are_listed_a_slice_at_a_time(monkeypatch, insert_every):
    monkeypatch.setattr(radix_cache_walker, "_KEYS_PER_SLICE", 4)
    tree = make_tree("radix")
    for token in range(40):
        tree.insert([token, 1])
    before = tree.held_slots()
    walker, seen, empty = RadixCacheWalker(tree.cache, False, False), set(), 0
    for call in range(1, 500):
        chunk = walker.next_chunk(max_us=1)
        if chunk is None:
            break
        check_chunk(tree, chunk)
        seen |= set(chunk.slot_indices.tolist())
        empty += chunk.num_slots == 0
        if insert_every and call % insert_every == 0 and call < 20:
            tree.insert([100 + call, 1])
    assert before <= seen
    assert empty >= 3


def test_the_slices_grow_while_the_children_change_each_time(monkeypatch):
    monkeypatch.setattr(radix_cache_walker, "_KEYS_PER_SLICE", 4)
    tree = make_tree("radix")
    for token in range(40):
        tree.insert([token, 1])
    walker, empty = RadixCacheWalker(tree.cache, False, False), 0
    while walker.next_chunk(max_us=1).num_slots == 0:
        empty += 1
        tree.insert([100 + empty, 1])
    assert empty == 5  # of 4, 8, 16, 32 and 64 keys


def evict_only(tree, prompt: list[int]) -> None:
    """All other prompts are in use."""
    prompts = [node.key.token_ids for node in tree.cache.root_node.children.values()]
    locks = [tree.lock(other) for other in prompts if list(other) != prompt]
    tree.evict(len(prompt))
    for lock in locks:
        tree.unlock(lock)


def replace_oldest(tree, last: list[int], count: int) -> None:
    """There are as many children as before, and the last one has the same key."""
    tree.evict(2 * count)
    for token in range(1000, 1000 + count):
        assert tree.insert([token, 1])
    evict_only(tree, last)
    assert tree.insert(last)


def come_and_go(tree, last: list[int], count: int) -> None:
    """The children are the same as before, in a table that has been made again."""
    for token in range(1000, 1000 + count):
        assert tree.insert([token, 1])
        evict_only(tree, [token, 1])


def being_listed(monkeypatch, gone: int):
    """A tree with many children, and a walk that has listed some of them."""
    monkeypatch.setattr(radix_cache_walker, "_KEYS_PER_SLICE", 16)
    tree = make_tree("radix")
    for token in range(80):
        assert tree.insert([token, 1])
    tree.evict(2 * gone)  # their places in the table are empty
    walker = RadixCacheWalker(tree.cache, False, False)
    assert walker.next_chunk(max_us=1).num_slots == 0
    return tree, walker


@pytest.mark.parametrize("gone", [0, 10])
@pytest.mark.parametrize("count", [1, 4, 12, 60])
@pytest.mark.parametrize("change", [replace_oldest, come_and_go])
def test_children_that_change_without_a_trace_while_they_are_listed(
    monkeypatch, change, count, gone
):
    tree, walker = being_listed(monkeypatch, gone)
    before, children = tree.held_slots(), tree.cache.root_node.children
    looks = len(children), next(reversed(children))
    change(tree, [79, 1], count)
    assert (len(children), next(reversed(children))) == looks
    stayed = before & tree.held_slots()
    chunks = walk_in_chunks(walker, max_us=1)
    for chunk in chunks:
        check_chunk(tree, chunk)
    assert stayed <= {slot for chunk in chunks for slot in chunk.slot_indices.tolist()}


def test_a_child_that_is_put_back_while_children_are_listed(monkeypatch):
    """SGLang's trees make a new node. Of another tree the walk cannot tell, and still ends."""
    tree, walker = being_listed(monkeypatch, gone=10)
    children = tree.cache.root_node.children
    key, node = children.popitem()
    tree.evict(2)
    assert tree.insert([1000, 1])
    children[key] = node
    for chunk in walk_in_chunks(walker, max_us=1):
        check_chunk(tree, chunk)


def test_a_chain_of_nodes_leaves_one_frame():
    tree = make_tree("radix")
    for length in range(1, 9):
        tree.insert(blocks(*range(length)))
    walker = RadixCacheWalker(tree.cache, False, False)
    frames = []
    while (chunk := walker.next_chunk(max_slots=4)) is not None:
        assert len(chunk.segments) == 1
        frames.append(len(walker._frames))
    assert frames == [1] * 7 + [0]


def test_the_estimate_of_the_gather_time_rises_fast_and_falls_slowly():
    gatherer, estimates = Gatherer(torch.device("cpu")), []
    gatherer.ns_per_node = 1000
    for measured in (5000, 5000, 1500, 0, -(10**6)):
        gatherer._learn_gather_time(measured)
        estimates.append(gatherer.ns_per_node)
    assert estimates == [2000, 4000, 3687, 3226, 1]


# -- random histories


@pytest.mark.parametrize(
    ("kind", "page", "swa_resident_only"),
    [(*tree, False) for tree in TREES] + [(*tree, True) for tree in SWA_TREES],
)
def test_random_histories(kind, page, swa_resident_only):
    @random_histories
    @given(st.lists(OPERATIONS, min_size=10, max_size=60))
    def run(operations):
        run_history(make_tree(kind, page), operations, swa_resident_only)

    run()


@pytest.mark.parametrize("page", [1, 4])
def test_random_histories_where_nodes_are_merged(page):
    """SGLANG_OPT_SWA_RADIX_CACHE_COMPACT: what is listed stays right; what hangs below a merge may wait a pass."""

    @random_histories
    @given(st.lists(OPERATIONS, min_size=10, max_size=60))
    def run(operations):
        run_history(make_tree("swa", page), operations, False, is_complete=False)

    with envs.SGLANG_OPT_SWA_RADIX_CACHE_COMPACT.override(True):
        run()


@pytest.mark.parametrize("then_match", [(1,), (1, 2), (1, 2, 3, 5)])
def test_a_merge_between_chunks_does_not_shift_positions(then_match):
    with envs.SGLANG_OPT_SWA_RADIX_CACHE_COMPACT.override(True):
        tree = make_tree("swa")
        tree.insert(blocks(1, 2, 3, 2, 7))
        tree.insert(blocks(1, 2, 3, 5))
        tree.match(blocks(1))  # 1 - 2, 3 - (2, 7 | 5)
        walker = RadixCacheWalker(tree.cache, False, False)
        assert walker.next_chunk(max_slots=4).num_slots == 4
        # Merges 1 with 2, 3: the node that was left at position 4 now ends elsewhere, and has a child 2 as before.
        tree.match(blocks(*then_match))
        for chunk in walk_in_chunks(walker, max_slots=3):
            check_chunk(tree, chunk)
        result = walk_radix_cache_for_canary(tree.cache, False, False)
        assert set(result.slot_indices.tolist()) == tree.held_slots()


# -- CUDA


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_walk_never_waits_for_the_gpu():
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    cache = RadixCache.create_simulated()
    cache.device = torch.device("cuda")
    for i in range(64):
        slots = torch.arange(1 + 8 * i, 9 + 8 * i, device="cuda")
        cache.insert(InsertParams(key=RadixKey([i // 8, *range(i, i + 7)]), value=slots))
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunks = walk_in_chunks(RadixCacheWalker(cache, False, False), max_slots=37)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(chunk.num_slots for chunk in chunks) == cache.total_size()
    for chunk in chunks:
        check_segments(chunk)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
