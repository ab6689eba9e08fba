"""Hooks on HiCache's storage backend: a prefetch continues tokens of its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...plan.anchor import anchor_of
from ...plan.host_chain import chain_of_tokens
from ..guard import guarded_aside
from ..hicache_storage import STORED, storage_hooks, store_of
from ..hook_spec import HookSpec, HookType
from .namespace import key_in_chains, namespace

__all__ = ["HOOKS"]


@guarded_aside
def _before_prefetch(
    controller: Any,
    handle: Any,
    key: Any,
    last_hash: str | None,
    prefix_keys: Sequence[str] | None,
    tokens: Sequence[int] | None,
    *_: Any,
    **__: Any,
) -> None:
    """`tokens`: those before the prefetch, in the namespace of `key`."""
    store = store_of(controller)
    if store is not None:
        anchor = anchor_of(namespace(key_in_chains(key.extra_key), key.cache_salt))
        store.begin(handle.rid, len(tokens or ()), chain_of_tokens(tokens or (), anchor))


_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
HOOKS = (
    HookSpec(f"{_CONTROLLER}.submit_prefetch", _before_prefetch, HookType.BEFORE, STORED),
    *storage_hooks(_TREE, f"{_CONTROLLER}._storage_hit_query"),
)
