"""Hooks on HiCache: the radix tree that keeps pages in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
    copy_hooks,
    start_tier,
)
from ..hook_spec import HookSpec, HookType
from ..host_pools import WITHOUT_HICACHE

__all__ = ["HOOKS", "refuse_tree", "refusing_hooks", "tree_hooks"]


def _after_tree(_: Any, tree: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER HiRadixCache.__init__: the host pool exists, or a group of them, and is empty."""
    start_tier(tree.token_to_kv_pool_host, _host_slots_of)


def _host_slots_of(tree: Any, token_ids: list[int]) -> list[int | None]:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens = tree.root_node.key.token_ids[:0]  # a list, or from 0.5.17 on an array
    tokens.extend(token_ids)
    node = tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).last_host_node
    slots: list[int | None] = []
    while node is not tree.root_node:
        here = node.host_value.tolist() if node.evicted else [None] * len(node.key)
        slots, node = here + slots, node.parent
    return slots


def refuse_tree(tree: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE the start of HiCache's other prefix caches."""
    if context.active:
        raise startup_error(
            f"HiCache with the prefix cache {type(tree).__name__} copies KV in ways that the canary does not follow. "
            f"{WITHOUT_HICACHE}",
            LOADED,
        )


def _around_init_load_back(original: Callable[..., Any], tree: Any, params: Any) -> Any:
    """Load the prefix up to the first page that has no record or is damaged. All ranks load the same."""
    tier = context.host_tier
    if tier is None or not params.best_match_node.evicted:
        return original(tree, params)
    nodes = _nodes_to_load(params.best_match_node)
    slots = torch.cat([node.host_value for node in nodes])
    usable = agreed(tree, attempt(tier.usable, slots))
    if usable == len(slots):
        return original(tree, params)
    usable -= usable % tree.page_size
    if params.req is not None:
        params.req.host_hit_length = usable
    node = _last_of(tree, nodes, usable)
    return original(tree, dataclasses.replace(params, best_match_node=node))


def _nodes_to_load(node: Any) -> list[Any]:
    """The evicted nodes up to `node`, first one first."""
    nodes = []
    while node.evicted:
        nodes.insert(0, node)
        node = node.parent
    return nodes


def _last_of(tree: Any, nodes: list[Any], tokens: int) -> Any:
    """The node that ends `tokens` after the first of `nodes` begins."""
    last = nodes[0].parent
    for node in nodes:
        if tokens < len(node.host_value):
            return tree._split_node(node.key, node, tokens) if tokens else last
        last, tokens = node, tokens - len(node.host_value)
    return last


_TREE = "sglang.srt.mem_cache.hiradix_cache.HiRadixCache"
_UNIFIED_TREE = "unified_radix_cache.UnifiedRadixCache.init_hicache"


def refusing_hooks(*starts: str) -> tuple[HookSpec, ...]:
    """`starts`: where prefix caches of HiCache begin, below `sglang.srt.mem_cache`. None of them starts."""
    return tuple(
        HookSpec(f"sglang.srt.mem_cache.{start}", refuse_tree, HookType.BEFORE, LOADED)
        for start in starts
    )


def tree_hooks(
    streams: CopyStreams, refused: tuple[str, ...], controllers: tuple[str, ...] = (CONTROLLER,)
) -> tuple[HookSpec, ...]:
    """The hooks. `refused`: where HiCache's other prefix caches start, below `sglang.srt.mem_cache`.

    `controllers`: as of `copy_hooks`.
    """
    return (
        HookSpec(f"{_TREE}.__init__", _after_tree, HookType.AFTER, LOADED),
        *refusing_hooks(*refused),
        HookSpec(f"{_TREE}.init_load_back", _around_init_load_back, HookType.AROUND, LOADED),
        *copy_hooks(
            streams,
            loads=(f"{CONTROLLER}.load", f"{HYBRID_CONTROLLER}.load"),
            pool="sglang.srt.mem_cache.memory_pool_host.HostKVCache",
            controllers=controllers,
        ),
    )


HOOKS = tree_hooks(
    CopyStreams(
        to_host=lambda controller: controller.write_stream,
        to_device=lambda controller: controller.load_stream,
    ),
    ("hi_mamba_radix_cache.HiMambaRadixCache.__init__", _UNIFIED_TREE),
    (CONTROLLER, HYBRID_CONTROLLER),
)
