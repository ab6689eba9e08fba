"""What is freed when a reader of damage ends, if its row or the free list may be wrong.

The row may lead to slots of others. A slot may have been freed too early. SGLang would free it again, and two requests
would get it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..guard import attempt_aside
from .free_list import free_pages_of, pages_waiting, set_free_pages

__all__ = ["OwnedSlots"]

# Those with `segment`, from 0.5.17 on, take slots that are one after the other in a row.
_FREES = ("free", "free_segment", "free_full_segment")


@dataclass(slots=True)
class OwnedSlots:
    """Of one allocator: a TokenToKVPoolAllocator, a PagedTokenToKVPoolAllocator or one for SWA."""

    allocator: Any
    rows: torch.Tensor  # int32[request rows, context length]
    disturbed: bool = False  # slots may be lost, or free and in use at once

    @property
    def _full(self) -> Any:
        return getattr(self.allocator, "full_attn_allocator", self.allocator)

    @contextmanager
    def freeing_only(
        self, cached: torch.Tensor | None, others: Iterable[tuple[int, int]]
    ) -> Iterator[None]:
        """`free` passes over slots that have another owner, or are free already. Waits for the schedule stream.

        `cached`: full slots of the prefix cache, on any device. `others`: (row, length) of the other requests. With
        None, or after an error, nothing is freed: a lost slot comes back, one that is freed twice has two owners.
        """
        free = self.allocator.free
        foreign = None if cached is None else attempt_aside(self._foreign, cached, others)

        def free_owned(slots: torch.Tensor, **_: Any) -> None:
            owned = None if foreign is None else attempt_aside(self._owned, slots, foreign)
            if owned is None:
                self.disturbed = True
                return
            is_paired = self._has_swa_slot(owned)
            free(owned[is_paired])
            if not bool(is_paired.all()):
                self.allocator.free_full(owned[~is_paired])

        with self._freeing_by(free_owned):
            yield

    @contextmanager
    def deferring(self, slots: list[torch.Tensor]) -> Iterator[None]:
        """`free` only adds to `slots`."""

        def defer(freed: torch.Tensor, **_: Any) -> None:
            slots.append(freed.clone())

        with self._freeing_by(defer):
            yield

    @contextmanager
    def _freeing_by(self, free: Callable[..., None]) -> Iterator[None]:
        """`free` takes the place of all methods by which SGLang frees slots of a request or of the cache."""
        names = [name for name in _FREES if hasattr(self.allocator, name)]
        for name in names:
            setattr(self.allocator, name, free)
        try:
            yield
        finally:
            for name in names:
                delattr(self.allocator, name)

    def _has_swa_slot(self, slots: torch.Tensor) -> torch.Tensor:
        """bool[n]: for which of `slots` `free` may free a SWA slot, too. Older releases look for themselves."""
        frees_alone = hasattr(self.allocator, "free_full") and not self.can_be_restored
        if not frees_alone or self.allocator.page_size > 1:
            return torch.ones_like(slots, dtype=torch.bool)
        return self.allocator.full_to_swa_index_mapping[slots.long()] > 0

    def _foreign(self, cached: torch.Tensor, others: Iterable[tuple[int, int]]) -> torch.Tensor:
        rows = [self.rows[row, :length].long() for row, length in others]
        return torch.cat([cached.to(self.rows.device, torch.int64), *rows])

    def _owned(self, slots: torch.Tensor, foreign: torch.Tensor) -> torch.Tensor:
        full, pages = self._full, slots.long() // self._full.page_size
        queued = [*pages_waiting(self.allocator), *pages_waiting(full)]
        foreign = foreign // full.page_size
        taken = torch.cat([free_pages_of(full), foreign, *queued])
        # Page 0 is padding, and on no list.
        inside = (pages > 0) & (slots < full.size + full.page_size)
        return slots[inside & ~torch.isin(pages, taken)].unique()

    @property
    def can_be_restored(self) -> bool:
        """Not on SWA pools, whose slots are free in one pool and in use in the other."""
        return self._full is self.allocator

    def restore(self, cached: torch.Tensor, withheld: Iterable[int]) -> tuple[int, int]:
        """On a server without requests: make the free list all that is neither cached nor in the pages `withheld`.

        Returns how many slots were lost, and how many were listed too often.
        """
        full = self.allocator
        size, device = full.size // full.page_size, full.free_pages.device
        is_free = torch.ones(size + 1, dtype=torch.bool, device=device)
        is_free[0] = False
        pages = cached.long() // full.page_size
        # The cache may have taken any number from a wrong row.
        is_free[pages[(pages >= 0) & (pages <= size)]] = False
        is_free[torch.tensor(list(withheld), dtype=torch.int64, device=device)] = False
        before = free_pages_of(full)
        known = torch.zeros_like(is_free)
        known[before] = True
        lost = (is_free & ~known).nonzero().flatten().to(before.dtype)
        kept = (is_free & known).nonzero().flatten().to(before.dtype)
        surplus = len(before) - len(kept)
        if surplus:
            set_free_pages(full, kept)
        if len(lost):
            offsets = torch.arange(full.page_size, device=device)
            full.free((lost[:, None] * full.page_size + offsets).flatten())
        self.disturbed = False
        return len(lost) * full.page_size, surplus * full.page_size
