"""HiCache's storage backend `file`: records are stored beside the pages, under keys of their own."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..host_tier.page_store import PageStore
from ..host_tier.record_files import RecordFiles
from ..host_tier.stored_records import identity_of
from .context import context
from .guard import attempt_aside
from .hicache_refusals import COVERED_STORAGE
from .hook_spec import HookSpec, HookType
from .releases import release

__all__ = ["STORED", "files_of", "identity_now", "storage_hooks", "store_of"]

STORED = "KV that is loaded from storage"
_UNNAMED = uuid.uuid4().hex  # weights without a name are this process's own


def store_of(controller: Any) -> PageStore | None:
    """The records beside the backend that is attached now. None without the canary."""
    tier, manager = context.host_tier, context.target
    if tier is None or manager is None:
        return None
    stores, backend = context.page_stores, controller.storage_backend
    if not stores or stores[-1].backend is not backend:
        stores.append(
            PageStore(
                tier,
                backend,
                controller.storage_backend_type,
                files_of(backend),
                controller.page_size,
                manager,
                lambda: identity_now(controller),
            )
        )
    return stores[-1]


def files_of(backend: Any) -> RecordFiles:
    """Those in the folder of a backend."""
    return RecordFiles(lambda key: _path(backend, key), lambda key: _forget_page(backend, key))


def _path(backend: Any, key: str) -> str:
    return os.path.join(backend.file_path, f"{backend._get_suffixed_key(key)}.bin")


def _forget_page(backend: Any, key: str) -> None:
    """The page is gone: SGLang stores it again, and counts its bytes no more. From 0.5.17 on it keeps such books."""
    name = backend._get_suffixed_key(key)
    if (cache := getattr(backend, "metadata_cache", None)) is not None:
        cache.remove(name)
    if (evictor := getattr(backend, "_evictor", None)) is None:
        return
    with evictor._lock:
        if name not in evictor._pending_writes:  # of these it has reserved the bytes
            evictor._total_bytes -= evictor._lru.pop(name, 0)


def _pool_of(controller: Any) -> Any:
    """The host pool. From 0.5.22 on `mem_pool_host` is a group of them."""
    return getattr(controller, "storage_host_pool", controller.mem_pool_host)


def identity_now(controller: Any) -> bytes:
    """Of what this server stores now: weights, layout of the pages, content mode."""
    args, manager, pool = release().server_args(), context.target, _pool_of(controller)
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
    if context.host_tier is not None and release().server_args().disaggregation_mode == "decode":
        return False, "kv-canary does not cover storage on a decode server"
    return original(tree, *args, **kwargs)


# Host to storage


def _around_page_set(
    original: Callable[..., bool],
    controller: Any,
    hash_values: Sequence[str],
    host_indices: torch.Tensor,
    extra_info: Any = None,
) -> bool:
    store = store_of(controller)
    if store is None:
        return original(controller, hash_values, host_indices, extra_info)
    exists = controller.storage_backend.exists
    claimed = attempt_aside(store.claim, hash_values, host_indices, exists)
    if claimed is None:
        return False
    ours = {*claimed.ours}
    # First: room for new pages is not made of the same prefix
    for page in claimed.pages:
        if hash_values[page] not in ours:
            attempt_aside(_keep_page, controller.storage_backend, hash_values[page])
    pages = [page for page in claimed.pages if hash_values[page] in ours]
    if not pages:
        return claimed.is_whole
    keys = [hash_values[page] for page in pages]
    slots = host_indices.view(-1, store.page_size)[pages].flatten()
    try:
        return original(controller, keys, slots, extra_info) and claimed.is_whole
    finally:
        # Not `exists`: it may remember a page that another server has removed since.
        attempt_aside(store.settle, claimed.ours, store.files.has_page)


def _keep_page(backend: Any, key: str) -> None:
    """It is there. SGLang's `set` would do the same, but if it has been evicted since, write it without records."""
    if (evictor := getattr(backend, "_evictor", None)) is not None:
        evictor.touch(backend._get_suffixed_key(key), _path(backend, key))


# Storage to host


def _around_hit_query(
    original: Callable[..., Any], controller: Any, operation: Any, *args: Any, **kwargs: Any
) -> tuple[list[str], int]:
    """Pages without records end the prefix."""
    keys, count = original(controller, operation, *args, **kwargs)
    store = store_of(controller)
    if store is None:
        return keys, count
    recorded = attempt_aside(store.recorded, keys) or 0
    return keys[:recorded], min(count, recorded * store.page_size)


class _Reading(threading.local):
    """The pages that this thread fetches for a prefetch.

    Called before one is read. Returns what to call after that, or None: the page is not used.
    """

    pages: Callable[[str], Callable[[torch.Tensor], bool] | None] | None = None


_reading = _Reading()


def _around_page_get(
    original: Callable[..., Any],
    controller: Any,
    operation: Any,
    hash_values: Sequence[str],
    host_indices: torch.Tensor,
    extra_info: Any = None,
) -> Any:
    store = store_of(controller)
    if store is not None:
        places = dict(zip(hash_values, host_indices.split(store.page_size), strict=True))

        def begin(key: str) -> Callable[[torch.Tensor], bool] | None:
            slots, known = places[key], store.known(key)

            def accept(page: torch.Tensor) -> bool:
                if operation.is_terminated():  # after a flush its slots are another page's
                    return False
                # SGLang stores the same bytes again. They must be there before anyone sees the records.
                _pool_of(controller).set_from_flat_data_page(slots[0], page)
                tokens = operation.token_ids.token_ids
                return store.accept(operation.request_id, key, tokens, slots.clone(), known)

            return None if known is None else accept

        _reading.pages = begin
    try:
        return original(controller, operation, hash_values, host_indices, extra_info)
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
    begin = _reading.pages
    if begin is None:
        return original(backend, keys, target_locations, target_sizes)
    pages: list[torch.Tensor | None] = [None] * len(keys)
    for number, key in enumerate(keys):
        if (accept := attempt_aside(begin, key)) is None:
            break
        try:
            (page,) = original(backend, [key], [target_locations[number]])
        except OSError:  # shorter than a page: another server is storing it
            break
        if page is None or not attempt_aside(accept, page):
            break
        pages[number] = page
    return pages


_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_FILE = "sglang.srt.mem_cache.hicache_storage.HiCacheFile"


def storage_hooks(tree: str, *queries: str) -> tuple[HookSpec, ...]:
    """`tree`: the prefix cache. `queries`: methods that ask storage for the pages of a prefix."""
    return (
        HookSpec(f"{tree}.attach_storage_backend", _around_attach, HookType.AROUND, STORED),
        *(HookSpec(query, _around_hit_query, HookType.AROUND, STORED) for query in queries),
        HookSpec(f"{_CONTROLLER}._generic_page_set", _around_page_set, HookType.AROUND, STORED),
        HookSpec(f"{_CONTROLLER}._generic_page_get", _around_page_get, HookType.AROUND, STORED),
        HookSpec(f"{_FILE}.batch_get", _around_batch_get, HookType.AROUND, STORED),
    )
