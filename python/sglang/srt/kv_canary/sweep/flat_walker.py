"""One pass over a prefix cache whose tree lists its own slots: SGLang's unified tree in Rust on 0.5.21.

The tree gives all slots at once, and may change before the next step. So a pass is one chunk, whose listing takes the
longer the larger the tree is. `StagedList` verifies it in parts. Nodes and namespaces are not told, so the first slot
of a prefix is verified without its chain. Nodes hold whole pages and are listed one after the other, so the list is one
of pages.
"""

from __future__ import annotations

from typing import Any

import torch

from ..record import PREV_ANCHOR, PREV_UNREACHABLE
from .chunk import RadixCacheWalkResult, WalkSegment
from .radix_cache_walker import NamespaceOf, device_of, refuse_pages_not_of, unwrap

__all__ = ["FlatWalker"]


class FlatWalker:
    """The same interface as RadixCacheWalker. Limits are ignored: see the module."""

    lists_at_once = True

    def __init__(
        self,
        radix_cache: Any,
        unlocked_only: bool,
        swa_resident_only: bool,
        namespace_of: NamespaceOf | None = None,  # such a tree tells no namespaces
    ) -> None:
        self._cache = unwrap(radix_cache)
        self._filters = (unlocked_only, swa_resident_only)
        self._is_over = False
        self.device = device_of(self._cache)

    def next_chunk(
        self, max_slots: int | None = None, max_us: float | None = None
    ) -> RadixCacheWalkResult | None:
        """All slots, then None."""
        if self._is_over:
            return None
        self._is_over = True
        walk = self._cache.tree_core.walk_for_kv_canary(*self._filters)
        slots, positions, prev_slots = (
            column.to(self.device, torch.int64, copy=True)
            for column in (walk.slot_indices, walk.positions, walk.prev_slot_indices)
        )
        count = slots.shape[0]
        if not count:
            return self.empty_result()
        prev_slots.masked_fill_(prev_slots == PREV_ANCHOR, PREV_UNREACHABLE)
        # Every page looks like a later one of a prefix: position 0 would ask for an anchor.
        segment = WalkSegment(0, count, self._cache.page_size, None)
        return RadixCacheWalkResult(slots, positions, prev_slots, (segment,))

    def refuse_pages_not_of(self, stride: int) -> None:
        """Raises UnsupportedRadixCacheError unless the tree's pages hold slots of `stride` tokens whole."""
        refuse_pages_not_of(self._cache, stride)

    def empty_result(self) -> RadixCacheWalkResult:
        """A chunk with n = 0."""
        return RadixCacheWalkResult.empty(self.device)
