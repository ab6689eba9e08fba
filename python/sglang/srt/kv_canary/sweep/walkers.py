"""The walker for a prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cached_ends import CachedEnds
from .chunk import RadixCacheWalkResult
from .core_walker import CoreWalker
from .flat_walker import FlatWalker
from .radix_cache_walker import ONE_FIELD, NamespaceOf, RadixCacheWalker, lists_at_once

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

__all__ = ["Walker", "walk_radix_cache_for_canary", "walker_of"]

Walker = RadixCacheWalker | CoreWalker | FlatWalker


def walker_of(
    radix_cache: BasePrefixCache,
    unlocked_only: bool = False,
    swa_resident_only: bool = False,
    namespace_of: NamespaceOf = ONE_FIELD,
    ends: CachedEnds | None = None,
) -> Walker:
    """A new pass over `radix_cache`. `ends`: where its prefixes end, if that is known.

    Raises UnsupportedRadixCacheError for a cache whose slots cannot be listed.
    """
    if not lists_at_once(radix_cache):
        return RadixCacheWalker(radix_cache, unlocked_only, swa_resident_only, namespace_of)
    if ends is not None and ends.is_told and not unlocked_only:
        if not ends.is_short[swa_resident_only]:
            return CoreWalker(radix_cache, swa_resident_only, ends)
        ends.is_short[swa_resident_only] = False  # a list misses nothing
    return FlatWalker(radix_cache, unlocked_only, swa_resident_only, namespace_of)


def walk_radix_cache_for_canary(
    radix_cache: BasePrefixCache,
    unlocked_only: bool = False,
    swa_resident_only: bool = False,
    ends: CachedEnds | None = None,
) -> RadixCacheWalkResult:
    """All slots that `radix_cache` holds on the device. The arguments are those of `walker_of`."""
    walker = walker_of(radix_cache, unlocked_only, swa_resident_only, ends=ends)
    chunk = walker.next_chunk()
    return walker.empty_result() if chunk is None else chunk
