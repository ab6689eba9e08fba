"""Damaged prefixes leave HiCache: the device, host memory, and the storage backend.

What a request has computed from damage fits its records, so no later check finds it. It may be on the device no more
when the damage is known. So it is looked for by its tokens, in all tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..containment.prefixes import Computed
from ..context import context
from ..guard import attempt_aside
from ..hicache_storage import store_of
from .cached_prefixes import CachedPrefixes, TreeKind, is_dropped, with_descendants

__all__ = ["HICACHE_TREE", "HiCachedPrefixes", "around_store_node"]


def _holders(node: Any) -> int:
    """Requests, copies to the device and from it, and operations of a storage backend."""
    return node.lock_ref + node.host_ref_counter


def _free_leaf(tree: Any, node: Any) -> None:
    from sglang.srt.disaggregation.kv_events import StorageMedium

    if not node.evicted:
        tree._record_remove_event(node, medium=StorageMedium.GPU)
        tree.token_to_kv_pool_allocator.free(node.value)
        tree.evictable_size_ -= len(node.key)
    if node.backuped:
        tree._record_remove_event(node, medium=StorageMedium.CPU)
        tree.cache_controller.evict_host(node.host_value)
    del node.parent.children[node.key.child_key(tree.page_size)]
    tree.evictable_leaves.discard(node)
    tree.evictable_host_leaves.discard(node)
    tree._update_leaf_status(node.parent)
    tree._update_host_leaf_status(node.parent)


HICACHE_TREE = TreeKind(_holders, _free_leaf)


@dataclass(slots=True)
class HiCachedPrefixes(CachedPrefixes):
    """A HiRadixCache. Used from the scheduler's thread, between two steps."""

    def drop(self, slots: Iterable[int] | None, computed: Iterable[Computed] = ()) -> int:
        computed = tuple(computed)
        nodes = self._nodes_with(slots)
        keys: list[str] = []
        for each in computed:  # while they can be reached
            path = list(self._path_of(each))
            if slots is not None:
                nodes += [node for node, end in path if end > each.start][:1]
            if self.tree.enable_storage:
                known = _known_key(path, each.start, self.tree.page_size)
                keys += _keys_behind(each, self.tree, *known)
        roots = self._hide_all(nodes)
        below = [node for root in roots for node in with_descendants(root)]
        # First its records: a thread that stores pages asks for them.
        self._forget_in_host_memory(below)
        if self.tree.enable_storage:
            # A flush of everything on the device says nothing of storage.
            dropped = [] if slots is None else [k for n in below for k in n.hash_value or ()]
            keys = [*dropped, *keys]
            attempt_aside(self._forget_in_storage, list(dict.fromkeys(keys)))
        self.free_unheld()
        return sum(len(node.key) for node in below)

    def free_unheld(self) -> None:
        """Also slots of nodes that storage still reads from host memory: SGLang would evict them itself."""
        CachedPrefixes.free_unheld(
            self
        )  # the class with slots is another one than super() would find
        for node in self._only_in_use_on_host():
            self.tree._evict_backuped(node)

    def has_unheld(self) -> bool:
        return CachedPrefixes.has_unheld(self) or any(True for _ in self._only_in_use_on_host())

    def _only_in_use_on_host(self) -> Iterator[Any]:
        """Dropped nodes whose slots nobody holds, leaves first."""
        for root in filter(self._is_in_tree, self._dropped):
            for node in reversed(list(with_descendants(root))):
                if node.backuped and not node.lock_ref and _is_last_on_device(node):
                    yield node

    def _path_of(self, computed: Computed) -> Iterator[tuple[Any, int]]:
        """The nodes with tokens of `computed`, and the position behind the last of these tokens in each."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tree = self.tree
        key = RadixKey(list(computed.tokens), computed.extra_key, is_bigram=tree.is_eagle)
        key, node, position = key.page_aligned(tree.page_size), tree.root_node, 0
        while len(key) and (child := node.children.get(key.child_key(tree.page_size))):
            matched = child.key.match(key, page_size=tree.page_size)
            position += matched
            yield child, position
            if matched < len(child.key):
                return
            node, key = child, key[matched:]

    def _forget_in_host_memory(self, nodes: Iterable[Any]) -> None:
        """No page without records is stored or loaded."""
        slots = [node.host_value for node in nodes if node.backuped]
        if slots and context.host_tier is not None:
            context.host_tier.records.clear(torch.cat(slots).cpu())

    def _forget_in_storage(self, keys: list[str]) -> None:
        tree = self.tree
        store = store_of(tree.cache_controller)
        if store is None or not keys:
            return
        try:
            store.forget(keys)
        finally:
            forgotten = frozenset(keys)
            for _, _, host_slots, operation in list(tree.ongoing_prefetch.values()):
                if host_slots is not None:
                    self._forget_fetched(host_slots, operation.hash_value, forgotten)

    def _forget_fetched(
        self, host_slots: torch.Tensor, keys: Sequence[str], forgotten: frozenset[str]
    ) -> None:
        """Pages of a prefetch that is under way."""
        pages = host_slots.split(self.tree.page_size)
        for key, page in zip(keys, pages, strict=False):
            if key in forgotten:
                context.host_tier.records.clear(page.cpu())


def _is_last_on_device(node: Any) -> bool:
    return not node.evicted and all(child.evicted for child in node.children.values())


def _known_key(
    path: Iterable[tuple[Any, int]], start: int, page_size: int
) -> tuple[int, str | None]:
    """A position up to `start`, and the key of the page that ends there: hashing a long prompt takes time."""
    known: tuple[int, str | None] = 0, None
    for node, end in path:
        if not known[0] < end <= start or not node.hash_value:
            break
        pages = (end - known[0]) // page_size  # of the last node perhaps not all
        known = end, node.hash_value[pages - 1]
    return known


def _keys_behind(
    computed: Computed, tree: Any, first: int = 0, key: str | None = None
) -> Iterator[str]:
    """The keys in storage of the pages with tokens of `computed`. `key`: of the page that ends at `first`."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    page_size, tokens = tree.page_size, RadixKey(list(computed.tokens), is_bigram=tree.is_eagle)
    for begin in range(first, len(tokens) // page_size * page_size, page_size):
        key = tokens.hash_page(begin, begin + page_size, key)
        if begin + page_size > computed.start:
            yield key


def around_store_node(original: Callable[..., None], tree: Any, node: Any) -> None:
    """A dropped prefix is not stored. Its copy to host memory was under way, or eviction makes one."""
    if context.containment is None or not attempt_aside(is_dropped, node):
        original(tree, node)
