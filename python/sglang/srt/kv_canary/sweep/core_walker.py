"""One pass over a unified tree whose core answers for single nodes: SGLang's in Rust, from 0.5.22 on.

Such a core does not tell what lies below a node, and listing all slots at once takes it 0.02 to 0.3 s. So the pass goes
from the root to each node that inserts have told of (`CachedEnds`). A node that lies on several ways is visited once.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ..record import PREV_UNREACHABLE
from .cached_ends import CachedEnds
from .chunk import Chunk, Gatherer, RadixCacheWalkResult, WalkedNode, cut, refuse_limits
from .radix_cache_walker import device_of, refuse_pages_not_of, unwrap

__all__ = ["CoreWalker", "tells_paths"]


def tells_paths(cache: Any) -> bool:
    """Whether the core of `cache` says by which nodes a node is reached. Not on 0.5.21."""
    return hasattr(getattr(unwrap(cache), "tree_core", None), "collect_path_info")


class CoreWalker:
    """The same interface as RadixCacheWalker. The tree may change between two chunks."""

    lists_at_once = False

    def __init__(self, radix_cache: Any, swa_resident_only: bool, ends: CachedEnds) -> None:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        self._cache = unwrap(radix_cache)
        self._core, self._ends = self._cache.tree_core, ends
        self._full, self._swa_resident_only = ComponentType.FULL, swa_resident_only
        self._swa = ComponentType.SWA if swa_resident_only and self._cache.supports_swa() else None
        self.device = device_of(self._cache)
        self._gatherer = Gatherer(self.device)
        self._left = deque(ends.begin_walk(self._held()))  # where the walk still has to go
        self._visited: set[int] = set()
        # To the first of these: what is not visited yet, and the node above that
        self._path: deque[Any] = deque()
        self._above: Any = None
        self._is_new = False  # whether the path was asked for in this chunk
        self._resume = 0  # positions before this one have been listed, of nodes on this path
        self._tail: tuple[int, int] | None = None  # (node, its last slot's index) in this chunk
        self._chunks = self._seen = 0

    def next_chunk(
        self, max_slots: int | None = None, max_us: float | None = None
    ) -> RadixCacheWalkResult | None:
        """See RadixCacheWalker. The first chunk may be empty, also of an empty tree."""
        refuse_limits(max_slots, max_us)
        if self._chunks and not self._left:
            return None
        self._chunks += 1
        chunk, self._tail = Chunk(self._chunks, max_slots, max_us), None
        self._is_new = False
        while self._left:
            if not self._path or not (self._is_new or self._still_holds()):
                self._enter(self._left[0])
            if self._path and not self._visit(chunk, self._path[0]):
                break
            if not self._path:
                self._left.popleft()
                self._resume = 0
            if self._gatherer.is_over(chunk):
                break
        if not self._left:
            self._ends.end_walk(self._seen, self._held(), self._swa_resident_only)
        return self._gatherer.gather(chunk)

    def refuse_pages_not_of(self, stride: int) -> None:
        """Raises UnsupportedRadixCacheError unless the tree's pages hold slots of `stride` tokens whole."""
        refuse_pages_not_of(self._cache, stride)

    def empty_result(self) -> RadixCacheWalkResult:
        """A chunk with n = 0."""
        return RadixCacheWalkResult.empty(self.device)

    def _held(self) -> int:
        """Slots of the FULL slot space that the tree holds."""
        return self._core.full_evictable_size() + self._core.full_protected_size()

    def _enter(self, node: int) -> None:
        """Go to `node`, which an insert has ended at."""
        self._path.clear()
        self._above, self._is_new = None, True
        if node in self._visited:
            return
        try:
            (path,) = self._core.collect_path_info([node])
        except KeyError:  # evicted since
            self._ends.forget(node)
            return
        self._ends.note_way(each.node_id for each in reversed(path))
        self._path.extend(path)
        self._skip_visited()

    def _skip_visited(self) -> None:
        while self._path and self._path[0].node_id in self._visited:
            self._above = self._path.popleft()

    def _still_holds(self) -> bool:
        """Whether a path of an earlier chunk leads to the next node as it did. Nodes may have been split or evicted."""
        return self._is_whole(self._path[0]) and (
            self._above is None or self._is_whole(self._above)
        )

    def _is_whole(self, node: Any) -> bool:
        try:
            value = self._value(node.node_id)
        except KeyError:  # evicted
            return False
        return value is not None and value.numel() == node.path_end - node.path_start

    def _visit(self, chunk: Chunk, node: Any) -> bool:
        """List the first node of the path, as far as the chunk has room. Returns whether that was all of it."""
        value = self._value(node.node_id)
        if (
            value is None
        ):  # on the host only, as is all below it. What brings it back inserts below it later
            self._ends.forget(node.node_id)
        else:
            first = max(node.path_start, self._resume)
            if first < node.path_end and self._is_wanted(node.node_id):
                stop = min(node.path_end, first + chunk.room)
                prev = self._prev_of(chunk, node, value, first)
                piece = cut(value, first - node.path_start, stop - node.path_start)
                chunk.add(WalkedNode(None, node.node_id), piece, first, prev)
                if stop < node.path_end:
                    self._resume = stop
                    return False
                self._tail = node.node_id, chunk.num_slots - 1
            self._seen += value.numel()
        self._visited.add(node.node_id)
        self._skip_visited()
        return True

    def _value(self, node: int) -> torch.Tensor | None:
        return self._core.get_component_device_value(node, self._full)

    def _is_wanted(self, node: int) -> bool:
        if self._swa is None:
            return True
        return self._core.get_component_device_value(node, self._swa) is not None

    def _prev_of(self, chunk: Chunk, node: Any, value: torch.Tensor, first: int) -> int:
        """Reference (see Chunk) to the predecessor of position `first` of the node."""
        offset = first - node.path_start
        if offset:
            return chunk.add_outside(value[offset - 1 : offset])
        if not first:
            return PREV_UNREACHABLE  # the core tells no namespaces
        if self._tail is not None and self._tail[0] == node.parent_id:
            return self._tail[1]
        before = self._value(node.parent_id)
        if before is None or not self._is_wanted(node.parent_id):
            return PREV_UNREACHABLE
        return chunk.add_outside(before[-1:])
