"""Hooks on HiCache's storage backend: a prefetch continues a node of the radix tree."""

from __future__ import annotations

from typing import Any

from ...plan.anchor import anchor_of
from ...record import WORD_CHAIN
from ..context import context
from ..guard import guarded_aside
from ..hicache_storage import STORED, storage_hooks, store_of
from ..hook_spec import HookSpec, HookType

__all__ = ["HOOKS"]


@guarded_aside
def _before_prefetch(tree: Any, req_id: str, last_host_node: Any, *_: Any, **__: Any) -> None:
    store = store_of(tree.cache_controller) if tree.enable_storage else None
    if store is not None:
        store.begin(req_id, *_end_of(tree, last_host_node))


def _end_of(tree: Any, node: Any) -> tuple[int, int | None]:
    """(tokens up to `node`, the last one's chain)."""
    if node is tree.root_node:
        return 0, anchor_of(node.key.extra_key)
    last = int(node.host_value[-1])
    record = context.host_tier.records.part(last, last + 1)
    chain = int(record.words[0, 0, WORD_CHAIN]) if record.present.all() else None
    position = 0
    while node is not tree.root_node:
        position, node = position + len(node.key), node.parent
    return position, chain


_TREE = "sglang.srt.mem_cache.hiradix_cache.HiRadixCache"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
HOOKS = (
    HookSpec(f"{_TREE}.prefetch_from_storage", _before_prefetch, HookType.BEFORE, STORED),
    *storage_hooks(_TREE, f"{_CONTROLLER}._storage_hit_query"),
)
