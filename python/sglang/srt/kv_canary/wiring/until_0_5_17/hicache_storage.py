"""Hooks on HiCache's storage backend: a prefetch continues a node of the radix tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...host_tier.page_store import PageStore
from ...record import WORD_CHAIN
from ..anchors import anchor_of_prefix
from ..context import context
from ..guard import attempt_aside
from ..hicache import CONTROLLER, HYBRID_CONTROLLER
from ..hicache_storage import STORED, storage_hooks, store_of
from ..hook_spec import HookSpec, HookType

__all__ = ["HOOKS"]


def _around_prefetch(
    original: Callable[..., None],
    tree: Any,
    req_id: str,
    last_host_node: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    attempt_aside(_begin, tree, req_id, last_host_node)
    try:
        original(tree, req_id, last_host_node, *args, **kwargs)
    finally:
        attempt_aside(_note_made, tree, req_id)


def _begin(tree: Any, req_id: str, last_host_node: Any) -> None:
    if (store := _store_of(tree)) is not None:
        store.begin(req_id, *_end_of(tree, last_host_node))


def _note_made(tree: Any, req_id: str) -> None:
    if (store := _store_of(tree)) is not None:
        *_, operation = tree.ongoing_prefetch.get(req_id, (None,))
        store.made(req_id, operation)


def _store_of(tree: Any) -> PageStore | None:
    return store_of(tree.cache_controller) if tree.enable_storage else None


def _end_of(tree: Any, node: Any) -> tuple[int, int | None]:
    """(tokens up to `node`, the last one's chain)."""
    if node is tree.root_node:
        return 0, anchor_of_prefix(node.key)
    last = int(node.host_value[-1])
    record = context.host_tier.records.part(last, last + 1)
    chain = int(record.words[0, 0, WORD_CHAIN]) if record.present.all() else None
    position = 0
    while node is not tree.root_node:
        position, node = position + len(node.key), node.parent
    return position, chain


_TREE = "sglang.srt.mem_cache.hiradix_cache.HiRadixCache"
HOOKS = (
    HookSpec(f"{_TREE}.prefetch_from_storage", _around_prefetch, HookType.AROUND, STORED),
    *storage_hooks(
        _TREE, f"{CONTROLLER}._storage_hit_query", f"{HYBRID_CONTROLLER}._storage_hit_query"
    ),
)
