"""Hooks on HiCache: records go with their pages to host memory and back.

The canary copies the records itself, beside SGLang's copies of the bytes and on their stream. So it does not matter how
the bytes are copied (kernels or memory copies, any layout).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...buffer_group import PoolKind
from ...config import ContentMode
from ...errors import startup_error
from ...host_tier.host_content import sources_of
from ...host_tier.host_sweep import HostSweep
from ...host_tier.host_tier import HostTier
from ...pool_patcher.errors import UnsupportedPoolError
from ..context import context
from ..guard import attempt, guarded
from ..hook_spec import HookSpec, HookType

if TYPE_CHECKING:
    from ...runner.manager import CanaryManager

__all__ = ["HOOKS", "protect"]

logger = logging.getLogger(__name__)

_LOADED = "KV that is loaded back from host memory"
_HOST_POOLS = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")


# Start


def _after_tree(_: Any, tree: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER HiRadixCache.__init__: the host pool exists and is empty."""
    manager = context.target
    if manager is None:
        return
    tier = protect(manager, tree.token_to_kv_pool_host)
    if manager.config.sweep_interval and tier.content:
        manager.observers.append(HostSweep(manager.config, tier, manager.sink))
    logger.info(
        "kv-canary: HiCache is protected, %d host slots, %d bytes of records in host memory",
        tier.records.num_slots,
        tier.records.nbytes,
    )


def protect(manager: CanaryManager, pool: Any) -> HostTier:
    """Keep records beside the target's empty host pool. Raises CanaryStartupError for a pool of another kind."""
    name = type(pool).__name__
    if name not in _HOST_POOLS or [g.kind for g in manager.groups] != [PoolKind.FULL]:
        raise startup_error(
            f"HiCache keeps pages in a {name}; the canary knows {' and '.join(_HOST_POOLS)}.",
            _LOADED,
        )
    try:
        tier = _tier_of(manager, pool)
    except UnsupportedPoolError as error:
        raise startup_error(f"{error}.", _LOADED) from error
    context.host_tier, context.host_slots_of = tier, _host_slots_of
    manager.observers.append(tier.launches)
    return tier


def _tier_of(manager: CanaryManager, pool: Any) -> HostTier:
    config, (group,) = manager.config, manager.groups
    content: tuple = ()
    if config.content_mode is not ContentMode.NONE:
        halves = pool.kv_buffer if len(group.halves) == 2 else (pool.kv_buffer,)
        content = tuple(
            sources_of(half, pool.layout, pool.layer_num, pool.size, pool.page_size)
            for half in halves
        )
    return HostTier(
        group,
        manager.state,
        content,
        pool.size,
        config.content_mode,
        config.host_check_budget_bytes,
        lambda finding: manager.violations.found(finding, manager.forward_ct),
    )


def _host_slots_of(tree: Any, token_ids: list[int]) -> list[int | None]:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    node = tree.match_prefix(MatchPrefixParams(key=RadixKey(token_ids))).last_host_node
    slots: list[int | None] = []
    while node is not tree.root_node:
        here = node.host_value.tolist() if node.evicted else [None] * len(node.key)
        slots, node = here + slots, node.parent
    return slots


def _refuse_tree(tree: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE the constructor of HiCache's other prefix caches."""
    if context.active:
        raise startup_error(
            f"HiCache with the prefix cache {type(tree).__name__} copies KV in ways that the canary does not follow.",
            _LOADED,
        )


# Device to host


def _around_start_writing(original: Callable[..., None], controller: Any) -> None:
    tier = context.host_tier
    if tier is None or not controller.write_queue:
        original(controller)
        return
    copied = attempt(_copy_back, tier, controller)
    original(controller)
    if copied is not None:
        attempt(_call_all, copied)


def _copy_back(tier: HostTier, controller: Any) -> list[Callable[[], None]]:
    stream = _stream_of(controller, controller.write_stream)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
        tier.launches.await_on(stream)
    if not context.target.armed:  # nothing is recorded now
        for op in controller.write_queue:
            tier.records.clear(op.host_indices)
        return []
    return [
        tier.copy_back(op.host_indices, op.device_indices, stream) for op in controller.write_queue
    ]


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _stream_of(controller: Any, stream: Any) -> Any | None:
    return None if str(controller.device).startswith("cpu") else stream


# Host to device


@guarded
def _after_load(device_slots: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """The prefix cache lists these slots from now on, and the copy begins with the next prefill."""
    if context.host_tier is not None and device_slots is not None:
        context.target.ledger.awaits_load_back = True


def _around_start_loading(original: Callable[..., int], controller: Any) -> int:
    tier = context.host_tier
    if tier is None or not controller.load_queue:
        return original(controller)
    loads = attempt(_records_for, tier, controller)
    producer = original(controller)
    if loads is not None:
        attempt(_arrive, tier, controller, loads)
    return producer


def _records_for(tier: HostTier, controller: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (op.device_indices, tier.records_for(op.host_indices, op.device_indices))
        for op in controller.load_queue
    ]


def _arrive(
    tier: HostTier, controller: Any, loads: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    stream = _stream_of(controller, controller.load_stream)
    ledger = context.target.ledger
    for device_slots, words in loads:
        context.slots_filled(
            device_slots, controller.page_size, "load from host memory", "start_loading", None
        )
        ledger.record_load_back(tier.load_back(device_slots, words, stream))
    ledger.awaits_load_back = False


def _around_init_load_back(original: Callable[..., Any], tree: Any, params: Any) -> Any:
    """Load the prefix up to the first page that has no record or is damaged. All ranks load the same."""
    tier = context.host_tier
    if tier is None or not params.best_match_node.evicted:
        return original(tree, params)
    nodes = _nodes_to_load(params.best_match_node)
    slots = torch.cat([node.host_value for node in nodes])
    usable = attempt(tier.usable, slots)
    usable = _agreed(tree, 0 if usable is None else usable)
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


def _agreed(tree: Any, usable: int) -> int:
    """The least of all ranks."""
    value = torch.tensor(usable, dtype=torch.int)
    tree._all_reduce_attn_groups(value, torch.distributed.ReduceOp.MIN)
    return int(value)


# Host pages that are given back


@guarded
def _after_host_free(_: Any, pool: Any, indices: torch.Tensor) -> None:
    if context.host_tier is not None:
        context.host_tier.records.clear(indices.cpu())


@guarded
def _after_host_clear(_: Any, pool: Any) -> None:
    if context.host_tier is not None:
        context.host_tier.records.clear()
        context.target.ledger.awaits_load_back = False


_TREE = "sglang.srt.mem_cache.hiradix_cache.HiRadixCache"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_POOL = "sglang.srt.mem_cache.memory_pool_host.HostKVCache"
HOOKS = (
    HookSpec(f"{_TREE}.__init__", _after_tree, HookType.AFTER, _LOADED),
    HookSpec(
        "sglang.srt.mem_cache.hi_mamba_radix_cache.HiMambaRadixCache.__init__",
        _refuse_tree,
        HookType.BEFORE,
        _LOADED,
    ),
    HookSpec(f"{_CONTROLLER}.start_writing", _around_start_writing, HookType.AROUND, _LOADED),
    HookSpec(f"{_CONTROLLER}.load", _after_load, HookType.AFTER, _LOADED),
    HookSpec(f"{_CONTROLLER}.start_loading", _around_start_loading, HookType.AROUND, _LOADED),
    HookSpec(f"{_TREE}.init_load_back", _around_init_load_back, HookType.AROUND, _LOADED),
    HookSpec(f"{_POOL}.free", _after_host_free, HookType.AFTER, _LOADED),
    HookSpec(f"{_POOL}.clear", _after_host_clear, HookType.AFTER, _LOADED),
)
