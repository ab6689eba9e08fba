"""The walker for a prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .chunk import RadixCacheWalkResult
from .flat_walker import FlatWalker
from .radix_cache_walker import ONE_FIELD, NamespaceOf, RadixCacheWalker, lists_at_once

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

__all__ = ["Walker", "walk_radix_cache_for_canary", "walker_of"]

Walker = RadixCacheWalker | FlatWalker


def walker_of(
    radix_cache: BasePrefixCache,
    unlocked_only: bool = False,
    swa_resident_only: bool = False,
    namespace_of: NamespaceOf = ONE_FIELD,
) -> Walker:
    """A new pass over `radix_cache`. Raises UnsupportedRadixCacheError for a cache whose slots cannot be listed."""
    walker = FlatWalker if lists_at_once(radix_cache) else RadixCacheWalker
    return walker(radix_cache, unlocked_only, swa_resident_only, namespace_of)


def walk_radix_cache_for_canary(
    radix_cache: BasePrefixCache, unlocked_only: bool = False, swa_resident_only: bool = False
) -> RadixCacheWalkResult:
    """All slots that `radix_cache` holds on the device. The arguments are those of RadixCacheWalker."""
    walker = walker_of(radix_cache, unlocked_only, swa_resident_only)
    chunk = walker.next_chunk()
    return walker.empty_result() if chunk is None else chunk
