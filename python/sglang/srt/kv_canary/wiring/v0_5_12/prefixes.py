"""How damage leaves the prefix cache of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..containment.prefixes import NoPrefixes, Prefixes
from .cached_prefixes import RADIX_TREE, SWA_TREE, CachedPrefixes
from .hicached_prefixes import HICACHE_TREE, HiCachedPrefixes
from .session_prefixes import SessionPrefixes

__all__ = ["prefixes_of", "prefixes_of_server"]


def prefixes_of_server(
    scheduler: Any, requests_of: Callable[[Any], Iterable[Any]]
) -> Prefixes | None:
    """Its prefix cache, and what streaming sessions keep beside it. `requests_of`: see Terms."""
    from sglang.srt.session.streaming_session import StreamingSession

    tree = scheduler.tree_cache
    if type(tree) is not StreamingSession:
        return prefixes_of(tree)
    inner = prefixes_of(tree.inner)
    return None if inner is None else SessionPrefixes(scheduler, inner, requests_of)


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
