"""Free pages that are held back, so that the allocators of all tensor-parallel ranks have as many.

SGLang's ranks schedule alike only if they have the same number of free slots. After a fault on one rank they may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .free_list import free_pages_of, set_free_pages

__all__ = ["ParkedPages"]


@dataclass(slots=True)
class ParkedPages:
    """Of the allocator of each pool kind's own slot space."""

    allocators: Mapping[str, Any]
    _parked: dict[str, torch.Tensor] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Free pages by pool kind, parked ones included."""
        return {
            kind: len(free_pages_of(own)) + len(self._parked.get(kind, ()))
            for kind, own in self.allocators.items()
        }

    def leave_free(self, counts: Mapping[str, int]) -> None:
        """Park what each allocator has beyond `counts` pages, and give back what was parked before."""
        for kind, own in self.allocators.items():
            parked = self._parked.pop(kind, own.free_pages[:0])
            pages = torch.cat([free_pages_of(own), parked])
            left = counts[kind]
            set_free_pages(own, pages[:left])
            if left < len(pages):
                self._parked[kind] = pages[left:]

    def after_clear(self, allocator: Any) -> None:
        """Its free list is complete again."""
        for kind, own in self.allocators.items():
            if own is allocator:
                self._parked.pop(kind, None)
