"""HiCache: records go with their pages to host memory and back.

The canary copies the records itself, beside SGLang's copies of the bytes and on their stream. So it does not matter how
the bytes are copied (kernels or memory copies, any layout). A family of releases says where its controller keeps the
streams, and shortens what a prefix cache loads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..host_tier.host_sweep import HostSweep
from ..pool_kind import PoolKind
from ..slot_event import SlotEventKind
from .context import context
from .guard import attempt, attempt_aside, guarded
from .hook_spec import HookSpec, HookType
from .host_pools import LOADED, WINDOWS, HostSlotsOf, HostWindows, host_pools_of, tier_of
from .swept_slots import await_sweep

if TYPE_CHECKING:
    from ..host_tier.host_tier import HostTier
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

CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
# Of pages that lie in several host pools.
HYBRID_CONTROLLER = (
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
)


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """The streams on which a HiCacheController copies."""

    to_host: Callable[[Any], Any]
    to_device: Callable[[Any], Any]


# Start


def start_tier(
    host: Any,
    host_slots_of: HostSlotsOf,
    loads_in_background: bool = False,
    window_slots_of: HostSlotsOf | None = None,
) -> None:
    """Protect `host`, the empty host pools of a prefix cache. Does nothing without the canary.

    `window_slots_of`: the same as `host_slots_of`, of the SWA slots. None: models with sliding windows are refused.
    """
    manager = context.target
    if manager is None:
        return
    tiers = protect(manager, host, host_slots_of, loads_in_background, window_slots_of)
    if manager.config.sweep_interval and tiers[0].content:
        manager.observers.append(HostSweep(manager.config, tiers, manager.sink))
    logger.info(
        "kv-canary: HiCache is protected, %d host slots, %d bytes of records in host memory",
        sum(tier.records.num_slots for tier in tiers),
        sum(tier.records.nbytes for tier in tiers),
    )


def protect(
    manager: CanaryManager,
    host: Any,
    host_slots_of: HostSlotsOf | None = None,
    loads_in_background: bool = False,
    window_slots_of: HostSlotsOf | None = None,
) -> tuple[HostTier, ...]:
    """Keep records beside `host`, the target's empty host pool, or SGLang's group of such pools.

    Returns a tier for each space of host slots. Raises CanaryStartupError for pools of other kinds.
    """
    pools, window = host_pools_of(manager, host, window_slots_of is not None)
    groups = tuple(g for g in manager.groups if window is None or g.kind is not PoolKind.SWA)
    tier = tier_of(manager, groups, pools, loads_in_background)
    context.host_tier, context.host_slots_of = tier, host_slots_of
    manager.observers.append(tier.launches)
    if window is None:
        return (tier,)
    groups = tuple(g for g in manager.groups if g.kind is PoolKind.SWA)
    of_window = tier_of(manager, groups, [window], loads_in_background)
    context.host_windows = HostWindows(window, of_window, window_slots_of)
    return tier, of_window


def agreed(tree: Any, usable: int | None) -> int:
    """The least of all ranks. None: this rank cannot say."""
    if tree.tp_world_size == 1:  # a tensor takes as long as half of the check
        return usable or 0
    value = torch.tensor(usable or 0, dtype=torch.int)
    tree._all_reduce_attn_groups(value, torch.distributed.ReduceOp.MIN)
    return int(value)


# What is copied


def _copies_of(operation: Any) -> Iterator[tuple[HostTier, torch.Tensor, torch.Tensor]]:
    """(tier, host slots, device slots) of each slot space of which HiCache's `operation` copies pages."""
    if len(operation.host_indices):
        yield context.host_tier, operation.host_indices, operation.device_indices
    if context.host_windows is None:
        return
    for transfer in operation.pool_transfers or ():
        if transfer.name == WINDOWS:
            yield context.host_windows.tier, transfer.host_indices, transfer.device_indices


# Device to host


def _copy_back(tier: HostTier, controller: Any, stream: Any) -> list[Callable[[], None]]:
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
        tier.launches.await_on(stream)
    copies = [copy for op in controller.write_queue for copy in _copies_of(op)]
    if not context.target.armed:  # nothing is recorded now
        for of_slots, host, _ in copies:
            of_slots.records.clear(host)
        return []
    return [of_slots.copy_back(host, device, stream) for of_slots, host, device in copies]


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


# Host to device


@guarded
def _after_load(device_slots: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """The prefix cache lists these slots from now on, and the copy begins with the next prefill."""
    if context.host_tier is not None and device_slots is not None:
        context.target.ledger.awaits_load_back = True


def _arrive(page_size: int, loads: Sequence[Any], stream: Any) -> None:
    """`loads`: HiCache's operations, whose bytes are being copied on `stream`."""
    ledger = context.target.ledger
    for load in loads:
        for tier, host, device in _copies_of(load):
            kind = tier.groups[0].allocator_kind
            context.slots_filled(
                device, page_size, "load from host memory", "start_loading", None, kind
            )
            for loaded in tier.load_back(device, tier.records_for(host, device), stream):
                ledger.record_load_back(loaded)
            # No records come with the draft model's KV, and not all of it was ever computed.
            for draft in context.drafts:
                draft.ledger.record(SlotEventKind.UNFILL, kind, device, page_size=1)
    ledger.awaits_load_back = False


# Host pages that are given back


@guarded
def _after_host_free(_: Any, pool: Any, indices: torch.Tensor) -> None:
    if context.host_tier is not None:
        _tier_beside(pool).records.clear(indices.cpu())


@guarded
def _after_host_clear(_: Any, pool: Any) -> None:
    if context.host_tier is not None:
        _tier_beside(pool).records.clear()
        context.target.ledger.awaits_load_back = False


def _tier_beside(pool: Any) -> HostTier:
    windows = context.host_windows
    return windows.tier if windows is not None and windows.pool is pool else context.host_tier


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
        attempt(_arrive, controller.page_size, loads, stream)
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
