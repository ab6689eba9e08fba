"""HiCache's storage backend `file`: records are stored beside the pages, under keys of their own.

The indexer of NSA and DSA has pages of its own, in files of their own. SGLang stores and fetches these apart. The
canary does so together with the latent rows: the records of a page are those of both, and only who stores the records
stores both.
"""

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
from ..pool_kind import PoolKind
from .context import context
from .guard import attempt_aside
from .hicache import CONTROLLER
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

    def page_gone(key: str) -> None:
        for file in _files_of_page(backend, key):
            _forget_file(backend, file)

    return RecordFiles(
        lambda key: _path(backend, key), page_gone, lambda key: _files_of_page(backend, key)
    )


def _indexer() -> Any | None:
    """SGLang's name of the host pool with the indexer's pages. None: there is none."""
    tier = context.host_tier
    if tier is None or all(group.kind is not PoolKind.INDEXER for group in tier.groups):
        return None
    from sglang.srt.mem_cache.hicache_storage import PoolName

    return PoolName.INDEXER


def _files_of_page(backend: Any, key: str) -> tuple[str, ...]:
    """The keys of a page's files."""
    indexer = _indexer()
    return (key,) if indexer is None else (key, backend._log_key(indexer, key))


def _path(backend: Any, key: str) -> str:
    return os.path.join(backend.file_path, f"{backend._get_suffixed_key(key)}.bin")


def _forget_file(backend: Any, key: str) -> None:
    """It is gone: SGLang stores it again, and counts its bytes no more. From 0.5.17 on it keeps such books."""
    name = backend._get_suffixed_key(key)
    if (cache := getattr(backend, "metadata_cache", None)) is not None:
        cache.remove(name)
    if (evictor := getattr(backend, "_evictor", None)) is None:
        return
    with evictor._lock:
        if name not in evictor._pending_writes:  # of these it has reserved the bytes
            evictor._total_bytes -= evictor._lru.pop(name, 0)


def _pool_of(controller: Any) -> Any:
    """The host pool that hands out the slots. `mem_pool_host` may be a group of pools, from 0.5.22 on it is one."""
    pool = getattr(controller, "storage_host_pool", controller.mem_pool_host)
    return pool.anchor_entry.host_pool if hasattr(pool, "anchor_entry") else pool


def identity_now(controller: Any) -> bytes:
    """Of what this server stores now: weights, layout of the pages, content mode."""
    args, manager, pool = release().server_args(), context.target, _pool_of(controller)
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
            "rows": [
                [s.row_bytes for s in group.content(half)]
                for group in manager.groups
                for half in group.halves
            ],
        }
    )


def _around_attach(original: Callable[..., Any], tree: Any, *args: Any, **kwargs: Any) -> Any:
    """While the server runs, too."""
    backend = kwargs.get("storage_backend", args[0] if args else None)
    if context.host_tier is not None and backend not in COVERED_STORAGE:
        return False, f"kv-canary does not cover the storage backend {backend!r}: use 'file'"
    if context.host_windows is not None:
        return False, "kv-canary does not cover storage with sliding windows"
    if getattr(tree, "supports_mamba", bool)():
        return False, "kv-canary does not cover storage with linear attention"
    if context.host_tier is not None and release().server_args().disaggregation_mode == "decode":
        return False, "kv-canary does not cover storage on a decode server"
    return original(tree, *args, **kwargs)


class _Moving(threading.local):
    """Whether this thread stores or fetches pages of the indexer for the canary."""

    is_ours = False


_moving = _Moving()


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
    backend = controller.storage_backend
    claimed = attempt_aside(
        store.claim, hash_values, host_indices, lambda key: _has_page(backend, key)
    )
    if claimed is None:
        return False
    ours = {*claimed.ours}
    # First: room for new pages is not made of the same prefix
    for page in claimed.pages:
        if hash_values[page] not in ours:
            attempt_aside(_keep_page, backend, hash_values[page])
    pages = [page for page in claimed.pages if hash_values[page] in ours]
    if not pages:
        return claimed.is_whole
    keys = [hash_values[page] for page in pages]
    slots = host_indices.view(-1, store.page_size)[pages].flatten()
    try:
        if not attempt_aside(_store_indexer, store, keys, slots):
            return False
        return original(controller, keys, slots, extra_info) and claimed.is_whole
    finally:
        # Not `exists`: it may remember a page that another server has removed since.
        attempt_aside(store.settle, claimed.ours, store.files.has_page)


def _has_page(backend: Any, key: str) -> bool:
    return all(backend.exists(file) for file in _files_of_page(backend, key))


def _keep_page(backend: Any, key: str) -> None:
    """It is there. SGLang's `set` would do the same, but if it has been evicted since, write it without records."""
    if (evictor := getattr(backend, "_evictor", None)) is not None:
        for file in _files_of_page(backend, key):
            evictor.touch(backend._get_suffixed_key(file), _path(backend, file))


def _store_indexer(store: PageStore, keys: Sequence[str], slots: torch.Tensor) -> bool:
    """Store the indexer's pages of pages whose records are this server's. Whether all are stored, or there are none."""
    if (name := _indexer()) is None:
        return True
    for key in keys:  # a half that is left of an evicted page: SGLang would not replace it
        store.files.remove_page(key)
    stored = all(_move(store.backend.batch_set_v2, name, keys, slots))
    # A server without the canary has stored the other half since: it stores all indexer's pages first.
    store.give_up_present(keys)
    return stored


def _move(move: Callable[..., Any], name: Any, keys: Sequence[str], slots: torch.Tensor) -> Any:
    """`move` of the backend, for the pages of one host pool. Whether each was moved."""
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    _moving.is_ours = True
    try:
        transfer = PoolTransfer(name=name, host_indices=slots, keys=list(keys))
        return move([transfer])[name]
    finally:
        _moving.is_ours = False


def _around_batch_set_v2(
    original: Callable[..., Any], backend: Any, transfers: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """SGLang stores the indexer's pages before it asks for the others: they are stored with these, see above."""
    name = _indexer()
    if name is None or _moving.is_ours:
        return original(backend, transfers, *args, **kwargs)
    later = {t.name: [True] * len(t.keys or ()) for t in transfers if t.name == name}
    others = [transfer for transfer in transfers if transfer.name != name]
    return later | (original(backend, others, *args, **kwargs) if others else {})


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
    """The pages that this thread fetches for a prefetch."""

    # Called before one is read. Returns what to call after that, or None: the page is not used.
    pages: Callable[[str], Callable[[torch.Tensor], bool] | None] | None = None
    accepted: frozenset[str] = frozenset()  # keys, of the last batch


_reading = _Reading()


def _around_page_get(
    original: Callable[..., Any],
    controller: Any,
    operation: Any,
    hash_values: Sequence[str],
    host_indices: torch.Tensor,
    extra_info: Any = None,
) -> Any:
    store, accepted = store_of(controller), set()
    if store is not None:
        places = dict(zip(hash_values, host_indices.split(store.page_size), strict=True))

        def begin(key: str) -> Callable[[torch.Tensor], bool] | None:
            slots, known = places[key], store.known(key)

            def accept(page: torch.Tensor) -> bool:
                if operation.is_terminated():  # after a flush its slots are another page's
                    return False
                # SGLang stores the same bytes again. They must be there before anyone sees the records.
                _pool_of(controller).set_from_flat_data_page(slots[0], page)
                if not _fetch_indexer(store, key, slots):
                    return False
                tokens = operation.token_ids.token_ids
                is_used = store.accept(operation.request_id, key, tokens, slots.clone(), known)
                accepted.update((key,) if is_used else ())
                return is_used

            return None if known is None else accept

        _reading.pages = begin
    try:
        return original(controller, operation, hash_values, host_indices, extra_info)
    finally:
        _reading.pages, _reading.accepted = None, frozenset(accepted)


def _fetch_indexer(store: PageStore, key: str, slots: torch.Tensor) -> bool:
    """Fetch the indexer's page of a page. False: it is not there, or a part of it is missing."""
    if (name := _indexer()) is None:
        return True
    try:
        return all(_move(store.backend.batch_get_v2, name, [key], slots))
    except OSError:
        return False


def _around_batch_get_v2(
    original: Callable[..., Any], backend: Any, transfers: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """From 0.5.22 on SGLang fetches the indexer's pages after the others of the batch: these are there already.

    Before, it fetches them first, and uses the others also if there is none.
    """
    name = _indexer()
    if name is None or _moving.is_ours:
        return original(backend, transfers, *args, **kwargs)
    known = {
        t.name: [key in _reading.accepted for key in t.keys or ()]
        for t in transfers
        if t.name == name
    }
    others = [transfer for transfer in transfers if transfer.name != name]
    return known | (original(backend, others, *args, **kwargs) if others else {})


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


_FILE = "sglang.srt.mem_cache.hicache_storage.HiCacheFile"


def storage_hooks(tree: str, *queries: str) -> tuple[HookSpec, ...]:
    """`tree`: the prefix cache. `queries`: methods that ask storage for the pages of a prefix."""
    return (
        HookSpec(f"{tree}.attach_storage_backend", _around_attach, HookType.AROUND, STORED),
        *(HookSpec(query, _around_hit_query, HookType.AROUND, STORED) for query in queries),
        HookSpec(f"{CONTROLLER}._generic_page_set", _around_page_set, HookType.AROUND, STORED),
        HookSpec(f"{CONTROLLER}._generic_page_get", _around_page_get, HookType.AROUND, STORED),
        HookSpec(f"{_FILE}.batch_get", _around_batch_get, HookType.AROUND, STORED),
        HookSpec(f"{_FILE}.batch_get_v2", _around_batch_get_v2, HookType.AROUND, STORED),
        HookSpec(f"{_FILE}.batch_set_v2", _around_batch_set_v2, HookType.AROUND, STORED),
    )
