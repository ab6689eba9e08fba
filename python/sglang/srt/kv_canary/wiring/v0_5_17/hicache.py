"""Hooks on HiCache: models with an indexer have the unified tree here. All others have the radix tree.

The unified tree loads all of a prefix or nothing. A request goes on with what it gets. So the canary shortens the
prefix just before the load.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...errors import startup_error
from ..context import context
from ..guard import attempt
from ..hicache import (
    CONTROLLER,
    HYBRID_CONTROLLER,
    LOADED,
    CopyStreams,
    agreed,
    start_tier,
)
from ..hook_spec import HookSpec, HookType
from ..releases import release
from ..until_0_5_17.hicache import refuse_tree, tree_hooks

__all__ = [
    "HOOKS",
    "TREE",
    "hooks_without_storage",
    "match_usable",
    "slots_to_load",
    "start_tree",
    "unified_hooks",
]

KeyOf = Callable[[Any, Any], Any]
TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"


def start_tree(_: Any, tree: Any, server_args: Any, *more: Any, **kwargs: Any) -> None:
    """AFTER UnifiedRadixCache.init_hicache: the host pools exist and are empty."""
    if not context.active:
        return
    if not release().settled(server_args).enable_hierarchical_cache:
        refuse_tree(tree)  # host memory for retracted requests
    start_tier(tree.host_pool_group, _host_slots_of)


def _start_without_storage(_: Any, tree: Any, server_args: Any, *more: Any, **kwargs: Any) -> None:
    if context.active and release().settled(server_args).hicache_storage_backend is not None:
        raise startup_error(
            f"HiCache with {type(tree).__name__} fetches pages from storage in ways that the canary does not follow. "
            "Remove --hicache-storage-backend.",
            LOADED,
        )
    start_tree(_, tree, server_args)


def _refuse_attach(original: Callable[..., Any], tree: Any, *args: Any, **kwargs: Any) -> Any:
    """While the server runs."""
    if context.host_tier is not None:
        return False, "kv-canary does not cover storage with this model on this release"
    return original(tree, *args, **kwargs)


def _host_slots_of(tree: Any, token_ids: list[int]) -> list[int | None]:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    found = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", token_ids))))
    on_device = [None] * len(found.device_indices)
    return on_device + slots_to_load(tree, found.best_match_node).tolist()


def slots_to_load(tree: Any, node: Any) -> torch.Tensor:
    """int64[n] on the CPU: host slots of the path to `node`. What the device pool holds is left out."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase

    (full,) = tree.tree_core.build_hicache_transfers(
        ComponentType.FULL, node, CacheTransferPhase.LOAD_BACK
    )
    return full.host_indices


def match_usable(tree: Any, key_of: KeyOf, req: Any, usable: int) -> tuple[Any, int]:
    """(the node with the first `usable` tokens that host memory has for `req`, how many these are)."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    # EAGLE's keys are pairs of tokens
    end = len(req.prefix_indices) + usable + tree.tree_core.is_eagle
    key = key_of(req, req.full_untruncated_fill_ids[:end])
    found = tree.match_prefix(MatchPrefixParams(key=key))
    return found.best_match_node, found.host_hit_length


def unified_hooks(key_of: KeyOf) -> tuple[HookSpec, ...]:
    """`key_of(request, its first tokens)`: the key under which the tree has them."""

    def around_init_load_back(original: Callable[..., Any], tree: Any, params: Any) -> Any:
        """Load the prefix up to the first page that has no record or is damaged. All ranks load the same."""
        tier = context.host_tier
        if tier is None or not params.host_hit_length:
            return original(tree, params)
        slots = attempt(slots_to_load, tree, params.best_match_node)
        total = None if slots is None else len(slots)
        usable = agreed(tree, None if slots is None else attempt(tier.usable, slots))
        if usable == total:
            return original(tree, params)
        usable -= usable % tree.page_size
        found = attempt(match_usable, tree, key_of, params.req, usable) if usable else None
        node, count = found or (params.req.last_node, 0)
        params.req.host_hit_length = count
        return original(tree, replace(params, best_match_node=node, host_hit_length=count))

    return (
        *hooks_without_storage(),
        HookSpec(f"{TREE}.init_load_back", around_init_load_back, HookType.AROUND, LOADED),
    )


def hooks_without_storage() -> tuple[HookSpec, ...]:
    """The unified tree starts, and neither then nor later with storage."""
    return (
        HookSpec(f"{TREE}.init_hicache", _start_without_storage, HookType.AFTER, LOADED),
        HookSpec(f"{TREE}.attach_storage_backend", _refuse_attach, HookType.AROUND, LOADED),
    )


def _key_of(request: Any, tokens: Any) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(tokens, extra_key=request.extra_key)


HOOKS = (
    *tree_hooks(
        CopyStreams(
            to_host=lambda controller: controller.write_stream,
            to_device=lambda controller: controller.load_stream,
        ),
        ("hi_mamba_radix_cache.HiMambaRadixCache.__init__",),
        (CONTROLLER, HYBRID_CONTROLLER),
    ),
    *unified_hooks(_key_of),
)
