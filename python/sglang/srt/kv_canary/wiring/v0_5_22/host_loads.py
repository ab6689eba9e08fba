"""What HiCache's unified tree would load of a prefix, and how much of it may be loaded.

Pages of sliding windows have host slots of their own. Of these SGLang loads what the device lacks of the last window.
A prefix may end only where its window is, on the device or in host memory. The same holds for the state of linear
attention. So the canary has the tree match a shorter prefix. Then it looks again at what that one would load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...host_tier.host_tier import HostTier
from ...pool_kind import PoolKind
from ..context import context

__all__ = ["host_slots_of", "loads_of", "usable_of", "window_slots_of"]


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Pages of one slot space that would be loaded."""

    tier: HostTier
    slots: torch.Tensor  # int64[n] on the CPU: host slots
    spans: Sequence[range]  # their positions in the prefix, n in all

    def usable_end(self) -> int | None:
        """The position of the first slot that may not be loaded. None: all may."""
        left = self.tier.usable(self.slots)
        for span in self.spans:
            if left < len(span):
                return span[left]
            left -= len(span)
        return None

    def placed(self) -> Iterator[tuple[int, int]]:
        """(position, host slot) of each slot."""
        positions = (position for span in self.spans for position in span)
        return zip(positions, self.slots.tolist(), strict=True)


def loads_of(tree: Any, node: Any, on_device: int) -> tuple[list[HostLoad], int]:
    """(what is to be loaded of the prefix that ends with `node`, the prefix's length in tokens).

    `on_device`: how many of its tokens the device pool holds. It may hold more full slots, without window or state.
    """
    if context.host_windows is None and not tree.supports_mamba():
        slots = _transfer(tree, node, "FULL").host_indices
        end = on_device + len(slots)
        return [HostLoad(context.host_tier, slots, [range(on_device, end)])], end
    (path,) = tree.tree_core.collect_path_info([node])
    span_of = {each.node_id: range(each.path_start, each.path_end) for each in path}
    loads = []
    tiers = {"FULL": context.host_tier}
    if context.host_windows is not None:
        tiers["SWA"] = context.host_windows.tier
    for name, tier in tiers.items():
        transfer = _transfer(tree, node, name)
        if transfer is not None and len(transfer.host_indices):
            spans = [span_of[each] for each in transfer.nodes_to_load]
            loads.append(HostLoad(tier, transfer.host_indices, spans))
    return loads, path[-1].path_end if path else 0


def _transfer(tree: Any, node: Any, component: str) -> Any:
    """SGLang's PoolTransfer of the host slots on the path to `node` that the device pool does not hold, or None."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase

    transfers = tree.tree_core.build_hicache_transfers(
        ComponentType[component], node, CacheTransferPhase.LOAD_BACK
    )
    return transfers[0] if transfers else None


def usable_of(tree: Any, node: Any, on_device: int) -> tuple[int, int]:
    """(how many tokens of the prefix that ends with `node` may be used, how many it has). On this rank alone."""
    loads, end = loads_of(tree, node, on_device)
    ends = [load.usable_end() for load in loads]
    return min([end, *(each for each in ends if each is not None)]), end


def host_slots_of(tree: Any, token_ids: list[int]) -> list[int | None]:
    return _placed_slots(tree, token_ids, PoolKind.FULL)


def window_slots_of(tree: Any, token_ids: list[int]) -> list[int | None]:
    return _placed_slots(tree, token_ids, PoolKind.SWA)


def _placed_slots(tree: Any, token_ids: list[int], kind: PoolKind) -> list[int | None]:
    """Of the longest cached prefix. None: the device pool holds the token, too, or its window does not reach it."""
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    prefixes = getattr(context.containment, "prefixes", None)
    key = RadixKey(array("q", token_ids), getattr(prefixes, "default_key", None))
    found = tree.match_prefix(MatchPrefixParams(key=key))
    loads, end = loads_of(tree, found.best_match_node, found.device_prefix_len)
    slots: list[int | None] = [None] * end
    for load in loads:
        if load.tier.groups[0].kind is kind:
            for position, slot in load.placed():
                slots[position] = slot
    return slots
