"""HiCache: records go with their pages to host memory and back.

The canary copies the records itself, beside SGLang's copies of the bytes and on their stream. So it does not matter how
the bytes are copied (kernels or memory copies, any layout). A family of releases says where its controller keeps the
streams, and shortens what a prefix cache loads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..config import ContentMode
from ..errors import startup_error
from ..host_tier.host_content import Sources, sources_of
from ..host_tier.host_sweep import HostSweep
from ..host_tier.host_tier import HostTier
from ..pool_kind import PoolKind
from ..pool_patcher.adapters.indexer_layout import host_indexer_content
from ..pool_patcher.errors import UnsupportedPoolError
from .context import context
from .guard import attempt, attempt_aside, guarded
from .hook_spec import HookSpec, HookType
from .speculative import mark_unfilled
from .swept_slots import await_sweep

if TYPE_CHECKING:
    from ..buffer_group import CanaryBufferGroup
    from ..runner.manager import CanaryManager

__all__ = [
    "CONTROLLER",
    "HYBRID_CONTROLLER",
    "LOADED",
    "CopyStreams",
    "agreed",
    "copy_hooks",
    "protect",
    "start_tier",
]

logger = logging.getLogger(__name__)

LOADED = "KV that is loaded back from host memory"
# In one slot space. A release has one of the last two.
_HOST_POOLS = {
    PoolKind.FULL: ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost"),
    PoolKind.INDEXER: ("NSAIndexerPoolHost", "DSAIndexerPoolHost"),
}
CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
# Of pages that lie in several host pools.
HYBRID_CONTROLLER = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
)
HostSlotsOf = Callable[[Any, list[int]], Sequence[int | None]]


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """The streams on which a HiCacheController copies."""

    to_host: Callable[[Any], Any]
    to_device: Callable[[Any], Any]


# Start


def start_tier(host: Any, host_slots_of: HostSlotsOf, loads_in_background: bool = False) -> None:
    """Protect `host`, the empty host pools of a prefix cache. Does nothing without the canary."""
    manager = context.target
    if manager is None:
        return
    tier = protect(manager, host, host_slots_of, loads_in_background)
    if manager.config.sweep_interval and tier.content:
        manager.observers.append(HostSweep(manager.config, tier, manager.sink))
    logger.info(
        "kv-canary: HiCache is protected, %d host slots, %d bytes of records in host memory",
        tier.records.num_slots,
        tier.records.nbytes,
    )


def protect(
    manager: CanaryManager,
    host: Any,
    host_slots_of: HostSlotsOf | None = None,
    loads_in_background: bool = False,
) -> HostTier:
    """Keep records beside `host`, the target's empty host pool, or SGLang's group of such pools.

    Raises CanaryStartupError for pools of other kinds.
    """
    pools = _pools_of(host)
    kinds = [_kind_of(pool) for pool in pools]
    if None in kinds or kinds != [group.kind for group in manager.groups]:
        names = ", ".join(type(pool).__name__ for pool in pools)
        alone, indexers = (" or ".join(names) for names in _HOST_POOLS.values())
        raise startup_error(
            f"HiCache keeps pages in {names}; the canary knows {alone} alone, or with {indexers}.",
            LOADED,
        )
    try:
        tier = _tier_of(manager, pools, loads_in_background)
    except UnsupportedPoolError as error:
        raise startup_error(f"{error}.", LOADED) from error
    context.host_tier, context.host_slots_of = tier, host_slots_of
    manager.observers.append(tier.launches)
    return tier


def _pools_of(host: Any) -> list[Any]:
    """The host pools of one slot space. The first one hands the slots out."""
    if not hasattr(host, "anchor_entry"):
        return [host]
    first = host.anchor_entry
    return [entry.host_pool for entry in (first, *(e for e in host.entries if e is not first))]


def _kind_of(pool: Any) -> PoolKind | None:
    return next((k for k, names in _HOST_POOLS.items() if type(pool).__name__ in names), None)


def _tier_of(manager: CanaryManager, pools: Sequence[Any], loads_in_background: bool) -> HostTier:
    config, content = manager.config, ()
    if config.content_mode is not ContentMode.NONE:
        content = tuple(
            sources
            for pool, group in zip(pools, manager.groups, strict=True)
            for sources in _content_of(pool, group)
        )
    return HostTier(
        manager.groups,
        manager.state,
        content,
        pools[0].size,
        config.content_mode,
        config.host_check_budget_bytes,
        lambda finding: manager.violations.found(finding, manager.forward_ct),
        loads_in_background,
    )


def _content_of(pool: Any, group: CanaryBufferGroup) -> list[Sources]:
    """Of each half. From 0.5.18 on MTP layers of the draft model may follow in the same pool."""
    if group.kind is PoolKind.INDEXER:
        return [host_indexer_content(pool, pool.device_pool)]
    halves = pool.kv_buffer if len(group.halves) == 2 else (pool.kv_buffer,)
    layers = getattr(pool, "target_layer_num", pool.layer_num)
    return [sources_of(half, pool.layout, layers, pool.size, pool.page_size) for half in halves]


def agreed(tree: Any, usable: int | None) -> int:
    """The least of all ranks. None: this rank cannot say."""
    if tree.tp_world_size == 1:  # a tensor takes as long as half of the check
        return usable or 0
    value = torch.tensor(usable or 0, dtype=torch.int)
    tree._all_reduce_attn_groups(value, torch.distributed.ReduceOp.MIN)
    return int(value)


# Device to host


def _copy_back(tier: HostTier, controller: Any, stream: Any) -> list[Callable[[], None]]:
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


# Host to device


@guarded
def _after_load(device_slots: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """The prefix cache lists these slots from now on, and the copy begins with the next prefill."""
    if context.host_tier is not None and device_slots is not None:
        context.target.ledger.awaits_load_back = True


def _arrive(tier: HostTier, page_size: int, loads: Sequence[Any], stream: Any) -> None:
    """`loads`: HiCache's operations, whose bytes are being copied on `stream`."""
    ledger = context.target.ledger
    for load in loads:
        slots = load.device_indices
        context.slots_filled(slots, page_size, "load from host memory", "start_loading", None)
        words = tier.records_for(load.host_indices, slots)
        for loaded in tier.load_back(slots, words, stream):
            ledger.record_load_back(loaded)
        # No records come with the draft model's KV, and not all of it was ever computed.
        for draft in context.drafts:
            mark_unfilled(draft, slots)
    ledger.awaits_load_back = False


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


def copy_hooks(
    streams: CopyStreams,
    loads: Sequence[str],
    pool: str,
    controllers: Sequence[str] = (CONTROLLER,),
) -> tuple[HookSpec, ...]:
    """The hooks on copies.

    `loads`: the methods that allocate slots for a load. `pool`: the base of host pools.
    `controllers`: the classes that begin copies in methods of their own.
    """

    def around_start_writing(original: Callable[..., None], controller: Any) -> None:
        tier = context.host_tier
        if tier is None or not controller.write_queue:
            original(controller)
            return
        stream = _unless_cpu(controller, streams.to_host)
        copied = attempt(_copy_back, tier, controller, stream)
        original(controller)
        if copied is not None:
            attempt(_call_all, copied)

    def around_start_loading(original: Callable[..., int], controller: Any) -> int:
        tier = context.host_tier
        if tier is None or not controller.load_queue:
            return original(controller)
        loads = list(controller.load_queue)
        stream = _unless_cpu(controller, streams.to_device)
        attempt_aside(await_sweep, stream)
        producer = original(controller)
        # The device copies bytes meanwhile. No page leaves host memory before that is over.
        attempt(_arrive, tier, controller.page_size, loads, stream)
        return producer

    return (
        *(
            hook
            for name in controllers
            for hook in (
                HookSpec(f"{name}.start_writing", around_start_writing, HookType.AROUND, LOADED),
                HookSpec(f"{name}.start_loading", around_start_loading, HookType.AROUND, LOADED),
            )
        ),
        *(HookSpec(load, _after_load, HookType.AFTER, LOADED) for load in loads),
        HookSpec(f"{pool}.free", _after_host_free, HookType.AFTER, LOADED),
        HookSpec(f"{pool}.clear", _after_host_clear, HookType.AFTER, LOADED),
    )


def _unless_cpu(controller: Any, stream_of: Callable[[Any], Any]) -> Any | None:
    return None if str(controller.device).startswith("cpu") else stream_of(controller)
