"""Where a forward's new tokens lie in the SWA pool: translated once per forward, and never kept beyond it.

SGLang keeps such translations in places that somebody must remember to bring up to date (bug class: a stale one
writes K/V into a slot that has meanwhile gone to another request). Here the value belongs to one forward. What
is asked for is compared with what was translated, by address, so that a value that does not apply is never given.
The kernels do not use it: they translate by themselves, so that they see where a token should have been written, and
compare. What is kept and what the mapping says differ only where one of them is stale.
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
        """One launch, also under stream capture, where each replay translates anew. None without new slots."""
        if out_cache_loc is None or not out_cache_loc.numel():
            return None
        return cls(mapping, out_cache_loc, translate_full_to_swa(mapping, out_cache_loc))

    def part_for(self, mapping: torch.Tensor, out_cache_loc: torch.Tensor) -> torch.Tensor | None:
        """`swa` for a view of `self.out_cache_loc` (a narrowed batch, half a batch); None for any other tensor."""
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
    """SWA slots int32[tokens] of `out_cache_loc`: of the running forward's translation where it applies.

    `kept` is None where no forward runs, or one without new slots. Then, and for tensors that `kept` was not
    made from (padded, replaced, arrived later, other slots altogether), `translate(out_cache_loc)` is asked.
    """
    part = None if kept is None else kept.part_for(mapping, out_cache_loc)
    return translate(out_cache_loc) if part is None else part


def translate_full_to_swa(mapping: torch.Tensor, full_slots: torch.Tensor) -> torch.Tensor:
    """int32, shaped like `full_slots`; equal to `mapping[full_slots].to(torch.int32)` in one launch."""
    if mapping.dtype != torch.int64:
        return mapping[full_slots].to(torch.int32)
    return mapping.view(torch.int32)[::2][full_slots]  # the low words, little-endian
