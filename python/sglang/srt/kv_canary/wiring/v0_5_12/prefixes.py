"""How damage leaves the prefix cache of a server."""

from __future__ import annotations

from typing import Any

from ..containment.prefixes import NoPrefixes, Prefixes
from .cached_prefixes import RADIX_TREE, SWA_TREE, CachedPrefixes
from .hicached_prefixes import HICACHE_TREE, HiCachedPrefixes

__all__ = ["prefixes_of"]


def prefixes_of(tree: Any) -> Prefixes | None:
    """None: a prefix cache from which nothing can be dropped."""
    from sglang.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

    if type(tree) in (ChunkCache, SWAChunkCache) or getattr(tree, "disable", False):
        return NoPrefixes()
    if type(tree) is RadixCache:
        return CachedPrefixes(tree, RADIX_TREE)
    if type(tree) is SWARadixCache:
        return CachedPrefixes(tree, SWA_TREE)
    if type(tree) is HiRadixCache:
        return HiCachedPrefixes(tree, HICACHE_TREE)
    return None
