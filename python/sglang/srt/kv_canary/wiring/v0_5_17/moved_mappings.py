"""Where 0.5.17 moves the mappings of SWA slots."""

from __future__ import annotations

from ..from_0_5_17.moved_mappings import before_action, before_move, move_hooks

_MEM_CACHE = "sglang.srt.mem_cache"
_COMPONENT = f"{_MEM_CACHE}.unified_cache.components.swa_component.SWAComponent"

HOOKS = move_hooks(
    {
        f"{_COMPONENT}.apply_component_action": before_action,
        f"{_MEM_CACHE}.swa_radix_cache.SWARadixCache._recover_tombstone_keeping_locked_full": before_move,
    }
)
