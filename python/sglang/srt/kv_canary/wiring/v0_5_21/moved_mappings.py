"""Where 0.5.20 and 0.5.21 move the mappings of SWA slots."""

from __future__ import annotations

from ..from_0_5_17.moved_mappings import before_action, move_hooks

_COMPONENT = "sglang.srt.mem_cache.unified_cache.components.swa.SWAComponent"
HOOKS = move_hooks({f"{_COMPONENT}.apply_component_action": before_action})
