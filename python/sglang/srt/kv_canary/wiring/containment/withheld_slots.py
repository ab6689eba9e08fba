"""Slots that are never handed out again, because their memory may be bad. SGLang's leak check counts them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from .free_list import free_pages_of, keep_free

__all__ = ["WithheldSlots", "allocators_by_kind"]

# Damage in more slots than this points to software, and withholding them would starve the server.
MOST_WITHHELD = 16
MOST_WITHHELD_SHARE = 1 / 64


def allocators_by_kind(allocator: Any) -> dict[str, Any]:
    """The allocator of each pool kind's own slot space."""
    if (full := getattr(allocator, "full_attn_allocator", None)) is not None:
        return {"FULL": full, "SWA": allocator.swa_attn_allocator}
    return {"FULL": allocator}


@dataclass(slots=True)
class WithheldSlots:
    """Pages of the allocators, by pool kind. A page is taken from the free list when it gets there."""

    allocators: dict[str, Any]
    _awaited: dict[str, set[int]] = field(default_factory=dict)  # pages that somebody still holds
    _withheld: dict[str, set[int]] = field(default_factory=dict)  # pages

    def withhold(self, kind: str, slot: int) -> bool:
        """Never hand out `slot` again. False if too many are withheld already, or if it is known."""
        allocator = self.allocators.get(kind)
        if allocator is None:
            return False
        page = slot // allocator.page_size
        awaited, withheld = (
            self._awaited.setdefault(kind, set()),
            self._withheld.setdefault(kind, set()),
        )
        if page in awaited or page in withheld:
            return False
        pages = allocator.size // allocator.page_size
        if len(awaited) + len(withheld) >= min(
            MOST_WITHHELD, max(1, int(pages * MOST_WITHHELD_SHARE))
        ):
            return False
        awaited.add(page)
        return True

    def take_from_free_lists(self) -> None:
        """Take what has been freed. Waits for the device, only while a page is awaited."""
        for kind, awaited in self._awaited.items():
            if awaited:
                taken = _remove_free(self.allocators[kind], awaited)
                awaited -= taken
                self._withheld[kind] |= taken

    def after_clear(self, allocator: Any) -> None:
        """The free list is complete again."""
        for kind, own in self.allocators.items():
            if own is allocator and kind in self._withheld:
                self._awaited[kind] |= self._withheld[kind]
                self._withheld[kind] = set()
                self.take_from_free_lists()

    def pages(self, kind: str) -> set[int]:
        """Pages of this pool kind that must not be free."""
        return self._awaited.get(kind, set()) | self._withheld.get(kind, set())

    def counts(self) -> Counter[str]:
        """Withheld slots by pool kind. They are neither free nor cached nor in use."""
        return Counter(
            {
                kind: len(pages) * self.allocators[kind].page_size
                for kind, pages in self._withheld.items()
                if pages
            }
        )


def _remove_free(allocator: Any, pages: set[int]) -> set[int]:
    """Remove `pages` from the allocator's free list. Returns those that were there."""
    free = free_pages_of(allocator)
    wanted = torch.tensor(sorted(pages), dtype=free.dtype, device=free.device)
    found = set(free[torch.isin(free, wanted)].tolist())
    if found:
        keep_free(allocator, lambda part: ~torch.isin(part, wanted))
    return found
