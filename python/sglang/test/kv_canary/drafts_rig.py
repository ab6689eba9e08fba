"""EAGLE v2 on pools of any class, for target and draft alike. Random bytes take the place of K and V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_kv_canary.plan.speculation import SpeculationShape

from .paged_rig import Rows
from .pool_fixtures import RealPool
from .spec_rig import SpecRig

__all__ = ["DraftsRig"]

STEPS = 3
_CHAIN = [-1, *range(STEPS)]  # parents of the tokens of a verify


class DraftsRig(SpecRig):
    """Slots of rejected tokens stay the row's, and the next step writes them."""

    def __init__(
        self, make: Callable[[], RealPool], rows_of: Callable[[Any, int], Rows], **settings: Any
    ) -> None:
        shape = SpeculationShape(num_steps=STEPS, topk=1, draft_tokens=STEPS + 1)
        super().__init__(shape, pools=(make(), make()), **settings)
        self._rows_of = rows_of
        self._held: dict[int, int] = {}  # positions of a row that have slots

    def allocate(self, row: int, start: int, end: int) -> torch.Tensor:
        held = max(start, self._held.get(row, 0))
        if end > held:
            super().allocate(row, held, end)
            self._held[row] = end
        return self._slots(row, range(start, end))

    def step(self, row: int, accepted: int) -> None:
        """A draft, its verify, of which `accepted` tokens stay, and a draft-extend of all of them."""
        start = self.lengths[row]
        slots = self.allocate(row, start, start + STEPS + 1)
        self.draft_decode([row], slots[:STEPS].view(1, 1, STEPS))
        drafts = [7000 + start + i for i in range(STEPS)]
        self.verify([row], [drafts], _CHAIN)
        kept = [*drafts[: accepted - 1], 100 + start]
        self.draft_extend_v2([row], [[*kept, *(9000 + i for i in range(STEPS + 1 - accepted))]])
        self.accept(row, kept)

    def rows_at(self, pool: Any, slot: int, kind: str, half: str) -> Sequence[torch.Tensor]:
        """The bytes of a slot, in place."""
        return self._rows_of(pool, slot)[(kind, half)]

    def _store(self, pool: Any, slots: torch.Tensor) -> None:
        for slot in slots.tolist():
            for rows in self._rows_of(pool, slot).values():
                for row in rows:
                    row.copy_(torch.randint(0, 256, row.shape, dtype=torch.uint8))
