"""Frees that `free()` does not see: by page, of one side of the SWA allocator, and at the end of a free group."""

from __future__ import annotations

from ..from_0_5_17.allocator import PAGED, SWA, free_hooks

HOOKS = free_hooks(f"{PAGED}.free_segment", f"{SWA}.free", f"{SWA}.free_swa", f"{SWA}.free_full")
