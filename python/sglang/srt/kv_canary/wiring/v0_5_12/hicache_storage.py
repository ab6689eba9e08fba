"""Hooks on HiCache's storage backend `file`: records are stored beside the pages, under keys of their own."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...host_tier.page_store import PageStore
from ...host_tier.record_files import RecordFiles
from ...host_tier.stored_records import identity_of
from ...plan.anchor import anchor_of
from ...record import WORD_CHAIN
from ..context import context
from ..guard import attempt_aside, guarded_aside
from ..hook_spec import HookSpec, HookType
from .hicache_refusals import COVERED_STORAGE

__all__ = ["HOOKS", "identity_now"]

_STORED = "KV that is loaded from storage"
_UNNAMED = uuid.uuid4().hex  # weights without a name are this process's own


def _store_of(controller: Any) -> PageStore | None:
    """The records beside the backend that is attached now. None without the canary."""
    tier, manager = context.host_tier, context.target
    if tier is None or manager is None:
        return None
    store, backend = context.page_store, controller.storage_backend
    if store is None or store.backend is not backend:
        files = RecordFiles(lambda key: _path(backend, key))
        store = PageStore(
            tier,
            backend,
            controller.storage_backend_type,
            files,
            controller.page_size,
            manager,
            lambda: identity_now(controller),
        )
        context.page_store = store
    return store


def _path(backend: Any, key: str) -> str:
    return os.path.join(backend.file_path, f"{backend._get_suffixed_key(key)}.bin")


def identity_now(controller: Any) -> bytes:
    """Of what this server stores now: weights, layout of the pages, content mode."""
    from sglang.srt.server_args import get_global_server_args

    args, manager, pool = get_global_server_args(), context.target, controller.mem_pool_host
    (group,) = manager.groups
    name = manager.weights_name if manager.weights_ct else args.weight_version
    if manager.weights_ct and name is None:
        name = f"{_UNNAMED}.{manager.weights_ct}"
    return identity_of(
        {
            "model": [args.model_path, args.revision, args.quantization, args.load_format],
            "weights": name,
            "dtype": [str(pool.dtype), args.dtype, args.kv_cache_dtype],
            "backend": controller.storage_backend.config_suffix,
            "layout": [pool.layout, pool.page_size, pool.layer_num, pool.start_layer],
            "content": str(manager.config.content_mode),
            "rows": [[s.row_bytes for s in group.content(half)] for half in group.halves],
        }
    )


def _around_attach(original: Callable[..., Any], tree: Any, *args: Any, **kwargs: Any) -> Any:
    """While the server runs, too."""
    backend = kwargs.get("storage_backend", args[0] if args else None)
    if context.host_tier is not None and backend not in COVERED_STORAGE:
        return False, f"kv-canary does not cover the storage backend {backend!r}: use 'file'"
    return original(tree, *args, **kwargs)


# Host to storage


def _around_page_set(
    original: Callable[..., bool],
    controller: Any,
    hash_values: Sequence[str],
    host_indices: torch.Tensor,
    extra_info: Any = None,
) -> bool:
    store = _store_of(controller)
    if store is None:
        return original(controller, hash_values, host_indices, extra_info)
    exists = controller.storage_backend.exists
    claimed = attempt_aside(store.claim, hash_values, host_indices, exists)
    if claimed is None:
        return False
    pages, ours = claimed
    if not pages:
        return True
    slots = host_indices.view(-1, store.page_size)[pages].flatten()
    done = False
    try:
        done = original(controller, [hash_values[page] for page in pages], slots, extra_info)
    finally:
        if not done:
            attempt_aside(store.withdraw, ours, exists)
    return done


# Storage to host


@guarded_aside
def _before_prefetch(tree: Any, req_id: str, last_host_node: Any, *_: Any, **__: Any) -> None:
    store = _store_of(tree.cache_controller) if tree.enable_storage else None
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


def _around_hit_query(
    original: Callable[..., Any], controller: Any, operation: Any
) -> tuple[list[str], int]:
    """Pages without records end the prefix."""
    keys, count = original(controller, operation)
    store = _store_of(controller)
    if store is None:
        return keys, count
    recorded = attempt_aside(store.recorded, keys) or 0
    return keys[:recorded], min(count, recorded * store.page_size)


class _Reading(threading.local):
    """The pages that this thread fetches for a prefetch."""

    pages: Callable[[str, torch.Tensor], bool] | None = None


_reading = _Reading()


def _around_page_get(
    original: Callable[..., None],
    controller: Any,
    operation: Any,
    hash_values: Sequence[str],
    host_indices: torch.Tensor,
    extra_info: Any = None,
) -> None:
    store = _store_of(controller)
    if store is not None:
        places = dict(zip(hash_values, host_indices.split(store.page_size), strict=True))

        def accept(key: str, page: torch.Tensor) -> bool:
            slots = places[key]
            # SGLang stores the same bytes again. They must be there before anyone sees the records.
            controller.mem_pool_host.set_from_flat_data_page(slots[0], page)
            return store.accept(
                operation.request_id, key, operation.token_ids.token_ids, slots.clone()
            )

        _reading.pages = accept
    try:
        original(controller, operation, hash_values, host_indices, extra_info)
    finally:
        _reading.pages = None


def _around_batch_get(
    original: Callable[..., Any],
    backend: Any,
    keys: Sequence[str],
    target_locations: Any = None,
    target_sizes: Any = None,
) -> Any:
    """A page that must not be used is as one that is not there: it ends the prefix."""
    accept = _reading.pages
    if accept is None:
        return original(backend, keys, target_locations, target_sizes)
    pages: list[torch.Tensor | None] = [None] * len(keys)
    for number, key in enumerate(keys):
        try:
            (page,) = original(backend, [key], [target_locations[number]])
        except OSError:  # shorter than a page: another server is storing it
            break
        if page is None or not attempt_aside(accept, key, page):
            break
        pages[number] = page
    return pages


_TREE = "sglang.srt.mem_cache.hiradix_cache.HiRadixCache"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_FILE = "sglang.srt.mem_cache.hicache_storage.HiCacheFile"
HOOKS = (
    HookSpec(f"{_TREE}.attach_storage_backend", _around_attach, HookType.AROUND, _STORED),
    HookSpec(f"{_TREE}.prefetch_from_storage", _before_prefetch, HookType.BEFORE, _STORED),
    HookSpec(f"{_CONTROLLER}._storage_hit_query", _around_hit_query, HookType.AROUND, _STORED),
    HookSpec(f"{_CONTROLLER}._generic_page_set", _around_page_set, HookType.AROUND, _STORED),
    HookSpec(f"{_CONTROLLER}._generic_page_get", _around_page_get, HookType.AROUND, _STORED),
    HookSpec(f"{_FILE}.batch_get", _around_batch_get, HookType.AROUND, _STORED),
)
