"""Walks over SGLang's real prefix caches, checked against what was written into each slot. Random histories."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from sglang.srt.environ import envs
from sglang_kv_canary.record import PREV_ANCHOR, PREV_UNREACHABLE
from sglang_kv_canary.sweep.cached_ends import CachedEnds
from sglang_kv_canary.sweep.radix_cache_walker import RadixCacheWalker
from sglang_kv_canary.wiring.cached_ends import InsertWatch

from .radix_fixtures import Owner, RealTree, make_tree

MAX_CHUNKS = 500


def tree_with_core(kind: str, page_size: int, core: str) -> tuple[RealTree, CachedEnds]:
    """A unified tree with SGLang's core in `core`, and where its inserts end, if it is followed."""
    with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(core):
        tree = make_tree(kind, page_size)
    ends = CachedEnds()
    InsertWatch(ends).attach_radix_cache(tree.cache)
    return tree, ends


def blocks(*values: int) -> list[int]:
    """Tokens that branch at multiples of 4, so that every page size can split there."""
    return [token for value in values for token in (value, 90, 91, 92)]


def fill(tree) -> None:
    """Two prompts that share two blocks, one that is a prefix of the first, and the same in a namespace."""
    for values in ((1, 2, 3), (1, 2, 4, 5), (1,), (6, 7)):
        assert tree.insert(blocks(*values, 50))
        assert tree.insert(blocks(*values, 50), extra_key="lora-a")


def entries(result) -> list[tuple[int, int, int]]:
    """(slot, position, predecessor) of each entry."""
    columns = (result.slot_indices, result.positions, result.prev_slot_indices)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def walk_in_chunks(walker, **limits) -> list:
    chunks = list(islice(iter(lambda: walker.next_chunk(**limits), None), MAX_CHUNKS))
    assert len(chunks) < MAX_CHUNKS, "the pass does not end"
    return chunks


def check_chunk(tree, result, swa_resident_only: bool = False) -> None:
    """Every entry is held right now, and position and predecessor are those that it was written with."""
    held, has_core = tree.held_owners(), hasattr(tree.cache, "tree_core")
    namespaces = [s.extra_key for s in result.segments for _ in range(s.length)]
    for (slot, position, prev), namespace in zip(entries(result), namespaces, strict=True):
        assert slot in held, f"slot {slot} is not held by the tree"
        assert position == len(held[slot].path) - 1
        assert namespace == (None if has_core else held[slot].extra_key)
        before = Owner(held[slot].path[:-1], held[slot].extra_key)
        if position == 0:
            assert prev == (PREV_UNREACHABLE if has_core else PREV_ANCHOR)
        elif position % tree.page_size:
            assert prev == slot - 1  # the same page
        elif prev == PREV_UNREACHABLE:
            gone = [s for s, owner in held.items() if owner == before]
            assert swa_resident_only
            assert [tree.swa_slot_of(s) for s in gone] == [0]
        else:
            assert held.get(prev) == before
        if swa_resident_only:
            assert tree.swa_slot_of(slot) > 0
            assert prev < 0 or tree.swa_slot_of(prev) > 0


def check_segments(result) -> None:
    """Segments cover the chunk in order."""
    starts = [segment.start for segment in result.segments]
    stops = [segment.start + segment.length for segment in result.segments]
    assert starts == [0, *stops[:-1]][: len(starts)]
    assert (stops[-1] if stops else 0) == result.num_slots
    for segment in result.segments:
        positions = result.positions[segment.start : segment.start + segment.length].tolist()
        assert positions == list(range(segment.position, segment.position + segment.length))


EXTRA_KEYS = st.sampled_from([None, None, "lora-a"])
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=10)
OPERATIONS = st.one_of(
    st.tuples(st.just("insert"), PROMPTS, EXTRA_KEYS, st.integers(0, 3)),
    st.tuples(st.just("insert"), PROMPTS, EXTRA_KEYS, st.just(0)),
    st.tuples(st.just("chunk"), st.integers(1, 9)),
    st.tuples(st.just("chunk"), st.integers(1, 9)),
    st.tuples(st.just("evict"), st.integers(1, 24)),
    st.tuples(st.just("evict_swa"), st.integers(1, 24)),
    st.tuples(st.just("match"), PROMPTS, EXTRA_KEYS),
    st.tuples(st.just("lock"), PROMPTS, EXTRA_KEYS),
    st.tuples(st.just("unlock")),
    st.tuples(st.just("load_back"), PROMPTS, EXTRA_KEYS),
)
random_histories = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def tokens_of(tree, prompt: list[int]) -> list[int]:
    """Page size 1: branches anywhere. Larger: whole pages."""
    if tree.page_size == 1:
        return [token for value in prompt for token in (value, 5 + value // 2)]
    return [value for value in prompt for _ in range(tree.page_size)]


def apply(tree, locks: list, operation: tuple) -> None:
    name, *args = operation
    if name == "insert":
        prompt, extra_key, swa_evicted = args
        swa_evicted = min(swa_evicted, len(prompt) - 1) * tree.page_size if tree.has_swa else 0
        tree.insert(tokens_of(tree, prompt), extra_key, swa_evicted)
    elif name == "evict":
        tree.evict(args[0])
    elif name == "evict_swa" and tree.has_swa:
        tree.evict_swa(args[0])
    elif name == "match":
        tree.match(tokens_of(tree, args[0]), args[1])
    elif name == "lock" and len(locks) < 3:
        locks.append(tree.lock(tokens_of(tree, args[0]), args[1]))
    elif name == "unlock" and locks:
        tree.unlock(locks.pop())
    elif name == "load_back" and tree.kind == "hiradix":
        tree.load_back(tokens_of(tree, args[0]), args[1])


def resident(tree, swa_resident_only: bool) -> dict[int, tuple]:
    """Slots that a pass must list, with what makes them the same slot later: the owner object, the SWA slot."""
    swa_slots = {slot: tree.swa_slot_of(slot) if tree.has_swa else 0 for slot in tree.held_slots()}
    return {
        slot: (id(tree.owners[slot]), swa_slots[slot])
        for slot in swa_slots
        if swa_slots[slot] > 0 or not swa_resident_only or not tree.has_swa
    }


def run_history(
    tree,
    operations,
    swa_resident_only: bool,
    is_complete: bool = True,
    walker_of: Callable[[], tuple[Any, Callable[[], set[int]]]] | None = None,
) -> None:
    """One pass while `operations` happen: each chunk is right when it is made, and nothing is left out.

    `walker_of` begins the pass, and says which slots lie in the nodes that it knows of at its begin, whenever it is
    asked. None: a RadixCacheWalker, which knows all.
    """
    half = len(operations) // 2
    locks: list = []
    for operation in operations[:half]:
        apply(tree, locks, operation)
    survivors, seen = set(resident(tree, swa_resident_only).items()), set()
    if walker_of is None:
        walker = RadixCacheWalker(tree.cache, False, swa_resident_only)
    else:
        walker, known = walker_of()
        at_first = known()

    def take(max_slots: int) -> bool:
        chunk = walker.next_chunk(max_slots=max_slots)
        if chunk is None:
            return False
        check_chunk(tree, chunk, swa_resident_only)
        check_segments(chunk)
        seen.update(chunk.slot_indices.tolist())
        return True

    for operation in operations[half:]:
        if operation[0] == "chunk":
            take(operation[1])
        else:
            apply(tree, locks, operation)
            survivors &= set(resident(tree, swa_resident_only).items())
    assert not all(take(4) for _ in range(MAX_CHUNKS)), "the pass does not end"
    must = {slot for slot, _ in survivors}
    if walker_of is not None:
        must &= at_first & known()
    if is_complete:
        assert must <= seen
