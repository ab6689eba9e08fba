"""Damaged prefixes leave the radix tree: out of reach at once, freed as soon as no request holds them.

A node that requests hold cannot be deleted. It gets a key of its own instead, which no request has. SGLang's locks,
sizes and eviction go on as before, because the node stays in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...sweep.out_of_cache import OutOfCache, is_out_of_cache
from ..containment.prefixes import Computed

__all__ = [
    "RADIX_TREE",
    "SWA_TREE",
    "CachedPrefixes",
    "TreeKind",
    "is_dropped",
    "with_descendants",
]


@dataclass(frozen=True, slots=True)
class TreeKind:
    """What differs between the trees."""

    holders: Callable[[Any], int]  # requests and copies that hold the node
    free: Callable[[Any, Any], None]  # a leaf that nobody holds, with its slots


def _free_leaf(tree: Any, node: Any) -> None:
    tree.token_to_kv_pool_allocator.free(node.value)
    tree._delete_leaf(node)
    tree._record_remove_event(node)


def _free_swa_leaf(tree: Any, node: Any) -> None:
    tree.token_to_kv_pool_allocator.free(node.value)
    tree._record_remove_event(node)
    tree.full_lru_list.remove_node(node)
    if not node.swa_tombstone:
        tree.swa_lru_list.remove_node(node)
    tree._delete_leaf(node)
    tree._iteratively_delete_tombstone_leaf(node)


RADIX_TREE = TreeKind(lambda node: node.lock_ref, _free_leaf)
SWA_TREE = TreeKind(lambda node: node.full_lock_ref, _free_swa_leaf)


@dataclass(slots=True)
class CachedPrefixes:
    """A RadixCache or SWARadixCache. Used from the scheduler's thread, between two steps."""

    tree: Any
    kind: TreeKind
    can_be_repaired: ClassVar[bool] = True
    loads_copies: ClassVar[bool] = False
    _dropped: list[Any] = field(default_factory=list)  # topmost nodes, still held by requests

    def drop(self, slots: Iterable[int] | None, computed: Iterable[Computed] = ()) -> int:
        """Nobody gets a prefix with one of `slots` (FULL) any more, or any prefix if it is None.

        Returns how many tokens were dropped.
        """
        roots = self._hide_all(self._nodes_with(slots))
        dropped = _tokens_below(roots)
        self.free_unheld()
        return dropped

    def _hide_all(self, nodes: list[Any]) -> list[Any]:
        """Take `nodes` out of reach. Returns the topmost of them: what is below these goes with them."""
        found = {id(node): node for node in nodes}
        roots = [n for n in found.values() if not any(id(a) in found for a in _ancestors(n))]
        for node in roots:
            self._hide(node)
        self._dropped += roots
        return roots

    def holds(self, request: Any) -> bool:
        """Whether `request` holds a dropped prefix, so that its own tokens must not be cached under the old key."""
        return is_dropped(request.last_node)

    def free_unheld(self) -> None:
        """Free what no request holds any more. Its slots are rewritten before anybody reads them."""
        self._dropped = [node for node in self._dropped if self._is_in_tree(node)]
        for node in self._dropped:
            self._free(node)
        self._dropped = [node for node in self._dropped if self._is_in_tree(node)]

    def has_unheld(self) -> bool:
        """Whether `free_unheld` would free something."""
        return any(
            not node.children and not self.kind.holders(node)
            for root in self._dropped
            if self._is_in_tree(root)
            for node in with_descendants(root)
        )

    def slots(self) -> torch.Tensor:
        """int64[n]: all full slots of the cache, on its device."""
        none = torch.empty(0, dtype=torch.int64, device=self.tree.device)
        nodes = (n for n in with_descendants(self.tree.root_node) if n.parent)
        return torch.cat([none, *(n.value for n in nodes if not _is_elsewhere(n))])

    @property
    def num_cached(self) -> int:
        """Tokens in the cache, dropped ones included."""
        return len(self.slots())

    @property
    def num_held(self) -> int:
        """Tokens of dropped prefixes that requests still hold."""
        return _tokens_below(self._dropped)

    def pin(self, request: Any) -> None:
        """Nothing: it is dropped, and freed by what its slots are."""

    def remember(self, request: Any) -> None:
        """Nothing: the tree knows a finished request by its tokens."""

    def slots_of(self, request: Any, start: int) -> list[int]:
        """Slots of the request's tokens from position `start` on, as far as they are cached."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tree, tokens = self.tree, request.origin_input_ids + request.output_ids
        key = RadixKey(tokens, request.extra_key, is_bigram=tree.is_eagle)
        key = key.page_aligned(tree.page_size)
        node, position, slots = tree.root_node, 0, []
        while len(key) and (child := node.children.get(key.child_key(tree.page_size))):
            matched = child.key.match(key, page_size=tree.page_size)
            if position + matched > start and not _is_elsewhere(child):
                slots += child.value[max(0, start - position) : matched].tolist()
            if matched < len(child.key):
                break
            node, key, position = child, key[matched:], position + matched
        return slots

    def _nodes_with(self, slots: Iterable[int] | None) -> list[Any]:
        """Nodes with one of `slots`, or the topmost ones. Copies the tree's slots to the host once."""
        if slots is None:
            children = self.tree.root_node.children.values()
            return [node for node in children if not is_out_of_cache(node)]
        nodes = [n for n in _reachable(self.tree.root_node) if not _is_elsewhere(n)]
        wanted = torch.tensor(list(slots), dtype=torch.int64, device=self.tree.device)
        if not nodes or not len(wanted):
            return []
        values = [node.value for node in nodes]
        lengths = torch.tensor([len(value) for value in values])
        hits = torch.isin(torch.cat(values), wanted).cpu()
        owners = torch.repeat_interleave(torch.arange(len(nodes)), lengths)[hits]
        return [nodes[i] for i in owners.unique().tolist()]

    def _hide(self, node: Any) -> None:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        page_size, siblings = self.tree.page_size, node.parent.children
        del siblings[node.key.child_key(page_size)]
        node.key = RadixKey(node.key.token_ids, OutOfCache(), is_bigram=node.key.is_bigram)
        siblings[node.key.child_key(page_size)] = node

    def _free(self, root: Any) -> None:
        """`root` and what is below it, leaves first, as far as nobody holds it."""
        for node in reversed(list(with_descendants(root))):
            if not node.children and not self.kind.holders(node) and self._is_in_tree(node):
                self.kind.free(self.tree, node)

    def _is_in_tree(self, node: Any) -> bool:
        """Not after eviction or a flush, which have freed its slots."""
        while node.parent is not None:
            if node.parent.children.get(node.key.child_key(self.tree.page_size)) is not node:
                return False
            node = node.parent
        return node is self.tree.root_node


def _reachable(root: Any) -> Iterator[Any]:
    """All nodes below `root` that requests can hit."""
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        if not is_out_of_cache(node):
            yield node
            waiting += node.children.values()


def is_dropped(node: Any | None) -> bool:
    """Whether nobody can reach `node`, because it or one above it was dropped."""
    while node is not None and node.parent is not None:
        if is_out_of_cache(node):
            return True
        node = node.parent
    return False


def with_descendants(node: Any) -> Iterator[Any]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()


def _tokens_below(roots: Iterable[Any]) -> int:
    return sum(len(node.key) for root in roots for node in with_descendants(root))


def _is_elsewhere(node: Any) -> bool:
    """Whether the device holds no slots of `node`, which is in host memory only."""
    return getattr(node, "evicted", False)


def _ancestors(node: Any) -> Iterator[Any]:
    while (node := node.parent) is not None:
        yield node
