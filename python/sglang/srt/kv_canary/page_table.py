"""Tables that say where a page lies now, of pools whose pages move under slot ids that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

Slots = TypeVar("Slots", int, np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class PageTable:
    """Number of each page in another numbering. SGLang owns the tensor, writes it in place and never replaces it.

    An entry that is not in 1 .. limit - 1 is unbound: page 0 is padding, and SGLang writes -1 where a page has none.
    """

    pages: torch.Tensor  # int64[pages], contiguous
    page_size: int  # slots per page, in both numberings
    limit: int  # pages of the other numbering

    def __post_init__(self) -> None:
        pages = self.pages
        if pages.dtype != torch.int64 or pages.ndim != 1 or not pages.is_contiguous():
            raise ValueError(
                f"expected a page table int64[pages], contiguous, got {pages.dtype} {tuple(pages.shape)}"
            )
        if self.page_size < 1 or self.limit < 1:
            raise ValueError(
                f"expected pages of at least 1 slot and at least 1 page, got {self.page_size} and {self.limit}"
            )

    def locate(self, slots: Slots) -> Slots:
        """`slots` (an int, or integers of shape [n]) in the other numbering. 0 where the page is unbound.

        -1 where there is no such page: on a GPU an index beyond the table would end the process.
        """
        page = slots // self.page_size
        exists = (page >= 0) & (page < self.pages.shape[0])
        found = self._entries(page * exists)
        located = found * self.page_size + slots % self.page_size
        return located * ((found > 0) & (found < self.limit) & exists) + (exists * 1 - 1)

    def _entries(self, page: Slots) -> Slots:
        if isinstance(page, torch.Tensor):
            return self.pages[page.long()]
        if isinstance(page, np.ndarray):
            return self.pages.numpy()[page]
        return int(self.pages[page])
