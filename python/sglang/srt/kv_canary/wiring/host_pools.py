"""HiCache's host pools: which of them the canary knows, and the records beside them.

The host pools of one slot space have the same host slots. SWA slots have a host pool with host slots of its own. SGLang
writes their pages back, evicts them and loads them on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import ContentMode
from ..errors import startup_error
from ..host_tier.host_content import Sources, sources_of
from ..host_tier.host_tier import HostTier
from ..pool_kind import PoolKind
from ..pool_patcher.adapters.indexer_layout import host_indexer_content
from ..pool_patcher.errors import UnsupportedPoolError

if TYPE_CHECKING:
    from ..buffer_group import CanaryBufferGroup
    from ..runner.manager import CanaryManager

__all__ = [
    "LOADED",
    "STATES",
    "WINDOWS",
    "WITHOUT_HICACHE",
    "HostSlotsOf",
    "HostWindows",
    "host_pools_of",
    "tier_of",
]

LOADED = "KV that is loaded back from host memory"
WITHOUT_HICACHE = "Remove --enable-hierarchical-cache."  # the way to keep the canary
WINDOWS = "swa"  # SGLang's name of the host pool of SWA slots
STATES = "mamba"  # of the host pool of linear attention's states, which are not checked
# In one slot space. A release has one of the last two.
_HOST_POOLS = {
    PoolKind.FULL: ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost"),
    PoolKind.INDEXER: ("NSAIndexerPoolHost", "DSAIndexerPoolHost"),
}
HostSlotsOf = Callable[[Any, list[int]], Sequence[int | None]]


@dataclass(frozen=True, slots=True)
class HostWindows:
    """The host memory of SWA slots."""

    pool: Any  # SGLang's
    tier: HostTier
    # Host slot of each token of the longest cached prefix; None: the device pool holds it, too, or no pool does
    host_slots_of: HostSlotsOf


def host_pools_of(manager: CanaryManager, host: Any, with_windows: bool) -> tuple[list[Any], Any]:
    """(the host pools of the full slots, the first one hands the slots out; the host pool of SWA slots, or None).

    `with_windows`: there may be one of SWA slots, or one of states, which has no records.

    Raises CanaryStartupError for pools other than those of the manager's groups.
    """
    pools, windows, states = _of_spaces(host)
    kinds = [_kind_of(pool) for pool in pools]
    kinds += [PoolKind.SWA if _kind_of(pool) is PoolKind.FULL else None for pool in windows]
    known = kinds == [group.kind for group in manager.groups]
    others = bool(windows) + bool(states)  # both at once have never run
    if None in kinds or not known or others > with_windows:
        names = ", ".join(type(pool).__name__ for pool in (*pools, *windows, *states))
        alone, indexers = (" or ".join(names) for names in _HOST_POOLS.values())
        raise startup_error(
            f"HiCache keeps pages in {names}; the canary knows {alone} alone, or with {indexers}. Beside one, a pool "
            "for sliding windows, or one for states of linear attention, it knows from SGLang 0.5.22 on. "
            f"{WITHOUT_HICACHE}",
            LOADED,
        )
    return pools, windows[0] if windows else None


def _of_spaces(host: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """(host pools of the full slots, of SWA slots, of states) of a host pool, or of SGLang's group of them."""
    if not hasattr(host, "anchor_entry"):
        return [host], [], []
    first = host.anchor_entry
    spaces: dict[str, list[Any]] = {"": [], WINDOWS: [], STATES: []}
    for entry in (first, *(entry for entry in host.entries if entry is not first)):
        spaces.get(getattr(entry, "name", ""), spaces[""]).append(entry.host_pool)
    return spaces[""], spaces[WINDOWS], spaces[STATES]


def _kind_of(pool: Any) -> PoolKind | None:
    return next((k for k, names in _HOST_POOLS.items() if type(pool).__name__ in names), None)


def tier_of(
    manager: CanaryManager,
    groups: tuple[CanaryBufferGroup, ...],
    pools: Sequence[Any],
    loads_in_background: bool,
) -> HostTier:
    """Records beside `pools`, the host pools of `groups`, all of one slot space.

    Raises CanaryStartupError if the bytes of a slot are scattered, or other ones than on the device.
    """
    config, content = manager.config, ()
    try:
        if config.content_mode is not ContentMode.NONE:
            content = tuple(
                sources
                for pool, group in zip(pools, groups, strict=True)
                for sources in _content_of(pool, group)
            )
        return HostTier(
            groups,
            manager.state,
            content,
            pools[0].size,
            config.content_mode,
            config.host_check_budget_bytes,
            lambda finding: manager.violations.found(finding, manager.forward_ct),
            loads_in_background,
        )
    except UnsupportedPoolError as error:
        raise startup_error(f"{error}. {WITHOUT_HICACHE}", LOADED) from error


def _content_of(pool: Any, group: CanaryBufferGroup) -> list[Sources]:
    """Of each half. From 0.5.18 on MTP layers of the draft model may follow in the same pool."""
    if group.kind is PoolKind.INDEXER:
        return [host_indexer_content(pool, pool.device_pool)]
    halves = pool.kv_buffer if len(group.halves) == 2 else (pool.kv_buffer,)
    layers = getattr(pool, "target_layer_num", pool.layer_num)
    return [sources_of(half, pool.layout, layers, pool.size, pool.page_size) for half in halves]
