"""The free pages of an allocator. Where SGLang keeps those that were freed last differs between releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["free_pages_of", "keep_free", "pages_waiting", "set_free_pages"]


def free_pages_of(allocator: Any) -> torch.Tensor:
    """Page numbers, those freed last at the end. A free group that is still open is not among them."""
    return torch.cat([allocator.free_pages, *_freed_last(allocator)])


def set_free_pages(allocator: Any, pages: torch.Tensor) -> None:
    """`pages` are free, and no other ones."""
    allocator.free_pages = pages
    _set_freed_last(allocator, [])


def keep_free(allocator: Any, stays: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Those of the free pages stay free for which `stays` says so, where they are."""
    freed_last = [pages[stays(pages)] for pages in _freed_last(allocator)]
    allocator.free_pages = allocator.free_pages[stays(allocator.free_pages)]
    _set_freed_last(allocator, freed_last)


def pages_waiting(allocator: Any) -> list[torch.Tensor]:
    """Page numbers that become free at the end of a free group."""
    pages = list(getattr(allocator, "free_page_ids_group", ()))
    if not getattr(allocator, "is_not_in_free_group", False):  # older releases keep the last group
        pages += [slots.long() // allocator.page_size for slots in allocator.free_group or ()]
    return pages


def _freed_last(allocator: Any) -> list[torch.Tensor]:
    if hasattr(allocator, "staged_pages"):  # pages of several slots, from 0.5.17 on
        return list(allocator.staged_pages)
    return [allocator.release_pages]


def _set_freed_last(allocator: Any, parts: list[torch.Tensor]) -> None:
    if hasattr(allocator, "staged_pages"):
        allocator.staged_pages = parts
        allocator.num_staged_pages = sum(map(len, parts))
    else:
        allocator.release_pages = torch.cat([allocator.free_pages[:0], *parts])
