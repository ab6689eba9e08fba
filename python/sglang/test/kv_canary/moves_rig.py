"""Verifies of draft trees on pools of any class: SGLang's own `move_kv_cache` moves what is accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.wiring.context import context

from .paged_rig import PagedRig, Rows
from .pool_fixtures import RealPool

__all__ = ["LostPart", "MovesRig"]

# Tokens 1 and 2 follow the bonus token 0, token 3 follows 2, token 4 follows 3.
_PARENTS, _DEPTHS = (-1, 0, 0, 2, 3), (0, 1, 1, 2, 3)
_ACCEPTED = (0, 2, 3)


class MovesRig(PagedRig):
    """Slots of rejected tokens stay the row's. Hooks must be in place. Use it as a context manager."""

    def __init__(
        self, make: Callable[[], RealPool], rows_of: Callable[[Any, int], Rows], **settings: Any
    ) -> None:
        super().__init__(make(), rows_of, tree_width=len(_PARENTS), **settings)

    def __enter__(self) -> MovesRig:
        context.add(self.manager, SimpleNamespace(pool=self.pool))
        return self

    def __exit__(self, *_: object) -> None:
        context.reset()

    def halves(self) -> Iterator[tuple[CanaryBufferGroup, str]]:
        return ((group, half) for group in self.manager.groups for half in group.halves)

    def parts(self, group: CanaryBufferGroup, half: str) -> int:
        """Rows of a slot: values and scales, of each layer."""
        return len(self.rows_at(group, half, 1))

    def step(self, row: int, lost: LostPart | None = None) -> int:
        """A verify, and a move of the accepted tokens. Returns the position of one; its part `lost` stays behind."""
        start, width = self.lengths[row], len(_PARENTS)
        slots = self._alloc_extend(row, width)
        self.rows.req_to_token[row, start : start + width] = slots.int()
        self.manager.plan_input.parents[:width] = torch.tensor(_PARENTS, dtype=torch.int32)
        tokens = [7 + start + d if n in _ACCEPTED else 7000 + n for n, d in enumerate(_DEPTHS)]
        positions = [start + depth for depth in _DEPTHS]
        batch = self._batch(ForwardMode.TARGET_VERIFY, [row], tokens, positions, slots)
        batch.seq_lens = torch.tensor([start])
        self._run(batch, slots, False)
        kept = len(_ACCEPTED)
        with lost.while_it_moves(int(slots[1])) if lost else nullcontext():
            self.pool.move_kv_cache(slots[:kept], slots[list(_ACCEPTED)])
        self.lengths[row] += kept
        self._reject(row, range(start + kept, start + width))
        sampled = torch.tensor([[8 + start + i for i in range(width)]])
        self.manager.note_next_tokens(torch.tensor([row]), sampled, torch.tensor([kept]))
        return start + 1


class LostPart:
    """One of a slot's rows keeps what a rejected token has left there."""

    def __init__(self, rig: MovesRig, group: CanaryBufferGroup, half: str, part: int) -> None:
        self._rig, self._group, self._half, self._part = rig, group, half, part

    @contextmanager
    def while_it_moves(self, target: int) -> Iterator[None]:
        """`target`: the full slot that it would move to."""
        self._row = self._rig.rows_at(self._group, self._half, target)[self._part]
        kept = self._row.clone()
        yield
        self._moved = self._row.clone()
        self._row.copy_(kept)

    def repair(self) -> None:
        self._row.copy_(self._moved)
