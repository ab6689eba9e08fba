"""Where 0.5.22 and 0.5.23 move the mappings of SWA slots."""

from __future__ import annotations

from typing import Any

from ..from_0_5_17.moved_mappings import before_move, move_hooks
from ..guard import guarded


@guarded
def _before_set_swa(component: Any, *_: Any, **__: Any) -> None:
    """Records of unified memory follow the move, in the order of the forwards."""
    if component._unified_allocator() is None:
        before_move()


HOOKS = move_hooks(
    {"sglang.srt.mem_cache.unified_cache.components.swa.SWAComponent._set_swa": _before_set_swa}
)
