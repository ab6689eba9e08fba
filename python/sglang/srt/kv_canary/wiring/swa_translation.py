"""Locations of a forward's new tokens in the SWA pool: translated once per forward, and never kept longer.

SGLang keeps such translations in places that some code must remember to update. Bug class: a stale translation writes
K/V into a slot that now belongs to another request. Here the value belongs to one forward. Each request for a location
compares the tensor's address with the translated one. A value that does not apply is never returned.

The kernels do not use it. They translate themselves, so they see where a token should have been written, and compare.
The kept value and the mapping differ only if one of them is stale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["SwaOutCacheLoc", "get_swa_out_cache_loc", "translate_full_to_swa"]


@dataclass(frozen=True, slots=True)
class SwaOutCacheLoc:
    """One forward's new slots, full and SWA."""

    mapping: torch.Tensor  # int64[full slots + 1], full slot -> SWA slot, 0 = evicted, -1 -> -1
    out_cache_loc: torch.Tensor  # int32/int64[tokens], full slots, 0 = padding
    swa: torch.Tensor  # int32[tokens]

    @classmethod
    def translate(
        cls, mapping: torch.Tensor, out_cache_loc: torch.Tensor | None
    ) -> SwaOutCacheLoc | None:
        """One launch, also under stream capture; each replay then translates again. None without new slots."""
        if out_cache_loc is None or not out_cache_loc.numel():
            return None
        return cls(mapping, out_cache_loc, translate_full_to_swa(mapping, out_cache_loc))

    def part_for(self, mapping: torch.Tensor, out_cache_loc: torch.Tensor) -> torch.Tensor | None:
        """`swa` for a view of `self.out_cache_loc` (a narrowed or halved batch). None for any other tensor."""
        whole = self.out_cache_loc
        if (
            mapping is not self.mapping
            or out_cache_loc.dtype != whole.dtype
            or out_cache_loc.ndim != 1
            or not (whole.is_contiguous() and out_cache_loc.is_contiguous())
        ):
            return None
        distance = out_cache_loc.data_ptr() - whole.data_ptr()
        first, rest = divmod(distance, whole.element_size())
        end = first + out_cache_loc.numel()
        if rest or first < 0 or end > whole.numel():
            return None
        return self.swa[first:end]


def get_swa_out_cache_loc(
    kept: SwaOutCacheLoc | None,
    mapping: torch.Tensor,
    out_cache_loc: torch.Tensor,
    translate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """SWA slots int32[tokens] of `out_cache_loc`, from the running forward's translation if it applies.

    `kept` is None if no forward runs, or one without new slots. Then `translate(out_cache_loc)` is called. It is also
    called for tensors from which `kept` was not made: padded, replaced, arrived later, or other slots.
    """
    part = None if kept is None else kept.part_for(mapping, out_cache_loc)
    return translate(out_cache_loc) if part is None else part


def translate_full_to_swa(mapping: torch.Tensor, full_slots: torch.Tensor) -> torch.Tensor:
    """int32, shaped like `full_slots`. Equal to `mapping[full_slots].to(torch.int32)`, in one launch."""
    if mapping.dtype != torch.int64:
        return mapping[full_slots].to(torch.int32)
    return mapping.view(torch.int32)[::2][full_slots]  # the low words, little-endian
