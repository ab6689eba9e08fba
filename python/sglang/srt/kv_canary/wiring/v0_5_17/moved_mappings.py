"""Where 0.5.17 moves the mappings of SWA slots."""

from __future__ import annotations

from typing import Any

from ..from_0_5_17.moved_mappings import before_move, move_hooks

_MEM_CACHE = "sglang.srt.mem_cache"
_MOVES = "RecoverSWAWithLockedFull"  # one of many actions


def _before_action(component: Any, action: Any) -> None:
    if type(action).__name__ == _MOVES:
        before_move()


HOOKS = move_hooks(
    {
        f"{_MEM_CACHE}.unified_cache.components.swa_component.SWAComponent.apply_component_action": _before_action,
        f"{_MEM_CACHE}.swa_radix_cache.SWARadixCache._recover_tombstone_keeping_locked_full": before_move,
    }
)
