"""A ManagerRig on any pool of a newer release. Random bytes take the place of K and V, where a test says they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.perturb.content import slot_in
from sglang_kv_canary.pool_kind import PoolKind

from .manager_rig import ManagerRig
from .pool_fixtures import RealPool

Rows = dict[tuple[str, str], list[torch.Tensor]]  # (pool kind, half) -> a slot's uint8 rows
WINDOW = 128


class PagedRig(ManagerRig):
    """Rows take whole pages from the allocator. A compressed slot is written with the last of its tokens."""

    def __init__(
        self, real: RealPool, rows_of: Callable[[Any, int], Rows], **settings: Any
    ) -> None:
        if hasattr(real.pool, "swa_kv_pool"):
            settings.setdefault("sliding_window_size", WINDOW)
        super().__init__(real=real, **settings)
        self._rows_of = rows_of
        self._left: dict[int, list[int]] = {
            row: [] for row in self.lengths
        }  # slots of its last page

    def group(self, kind: PoolKind) -> CanaryBufferGroup:
        return next(group for group in self.manager.groups if group.kind is kind)

    def rows_at(self, group: CanaryBufferGroup, half: str, full_slot: int) -> list[torch.Tensor]:
        """The bytes of a full slot in a group, in place."""
        return self._rows_of(self.pool, slot_in(group, full_slot))[(group.kind.value, half)]

    def _alloc_extend(self, row: int, count: int) -> torch.Tensor:
        left = self._left[row]
        while len(left) < count:
            left += self._page().tolist()
        self._left[row] = left[count:]
        return torch.tensor(left[:count])

    def _alloc_decode(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.cat([self._alloc_extend(row, 1) for row in rows])

    def _reject(self, row: int, positions: range) -> None:
        """They stay the row's, and the next verify writes them."""
        slots = self.rows.req_to_token[row, positions.start : positions.stop]
        self._left[row] = [*slots.tolist(), *self._left[row]]

    def _page(self) -> torch.Tensor:
        size, allocator = self.pool.page_size, self.allocator
        if not hasattr(allocator, "swa_attn_allocator"):
            return allocator.alloc(size)
        parts = (allocator.full_attn_allocator, allocator.swa_attn_allocator)
        full, swa = (part.alloc(size) for part in parts)
        self.pool.full_to_swa_index_mapping[full] = swa
        return full

    @contextmanager
    def _translated(self, batch: Any) -> Iterator[None]:
        """These releases pass no SWA slots with the batch."""
        yield

    def _model(self, slots: torch.Tensor) -> None:
        for group in self.manager.groups:
            complete = [slot for slot in slots.tolist() if (slot + 1) % group.stride == 0]
            for slot in complete:
                for half in group.halves:
                    for row in self.rows_at(group, half, slot):
                        row.copy_(torch.randint(0, 256, row.shape, dtype=torch.uint8))
