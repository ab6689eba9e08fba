"""Frees that `free()` does not see: by page, and of the SWA allocator in a free group. Here `free_swa` waits, too."""

from __future__ import annotations

from ..from_0_5_17.allocator import PAGED, SWA, free_hooks

HOOKS = free_hooks(f"{PAGED}.free_segment", f"{SWA}.free", f"{SWA}.free_swa")
