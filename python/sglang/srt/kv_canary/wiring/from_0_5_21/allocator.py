"""Frees that `free()` does not see: by page, and of the SWA slots of some full slots."""

from __future__ import annotations

from ..from_0_5_17.allocator import PAGED, SWA, free_hooks

HOOKS = free_hooks(f"{PAGED}.free_page_ids", f"{SWA}.free_swa", f"{SWA}.free_swa_segment")
