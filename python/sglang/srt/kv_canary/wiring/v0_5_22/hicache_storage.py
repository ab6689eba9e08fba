"""Hooks on HiCache's storage backend: a prefetch continues tokens of its request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...plan.host_chain import chain_of_tokens
from ..anchors import anchor_of_prefix
from ..guard import attempt_aside
from ..hicache import HYBRID_CONTROLLER
from ..hicache_storage import STORED, storage_hooks, store_of
from ..hook_spec import HookSpec, HookType
from ..v0_5_17.hicache import TREE

__all__ = ["HOOKS"]


def _around_prefetch(
    original: Callable[..., Any],
    controller: Any,
    handle: Any,
    key: Any,
    last_hash: str | None,
    prefix_keys: Sequence[str] | None,
    tokens: Sequence[int] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`tokens`: those before the prefetch, in the namespace of `key`."""
    attempt_aside(_begin, controller, handle, key, tokens)
    made = None
    try:
        made = original(controller, handle, key, last_hash, prefix_keys, tokens, *args, **kwargs)
        return made
    finally:
        attempt_aside(_note_made, controller, handle, made)


def _begin(controller: Any, handle: Any, key: Any, tokens: Sequence[int] | None) -> None:
    if (store := store_of(controller)) is not None:
        chain = chain_of_tokens(tokens or (), anchor_of_prefix(key))
        store.begin(handle.rid, len(tokens or ()), chain)


def _note_made(controller: Any, handle: Any, made: Any) -> None:
    """`made`: SGLang's PrefetchSubmission. None after an error."""
    if (store := store_of(controller)) is not None:
        store.made(handle.rid, None if made is None else made.operation)


HOOKS = (
    HookSpec(f"{HYBRID_CONTROLLER}.submit_prefetch", _around_prefetch, HookType.AROUND, STORED),
    *storage_hooks(TREE, f"{HYBRID_CONTROLLER}._storage_hit_query"),
)
