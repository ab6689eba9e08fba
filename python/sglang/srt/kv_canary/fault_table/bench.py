"""Replaces parts of SGLang's own code in the scheduler process while a fault is staged, and notes when it strikes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..wiring.context import context

__all__ = ["AWAIT", "BREAK", "MEND", "ROLE", "Bench"]

ROLE = "bench"  # of the address
BREAK, MEND, AWAIT = "break", "mend", "await"


class Bench:
    """SGLang's parts in this process, and what the staged fault has replaced in them."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.strikes: list[dict[str, Any]] = []
        self._undo: list[Callable[[], None]] = []

    @property
    def tree_cache(self) -> Any:
        return self.scheduler.tree_cache

    @property
    def rows(self) -> Any:
        """SGLang's ReqToTokenPool."""
        return self.scheduler.req_to_token_pool

    @property
    def allocator(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator

    @property
    def pool(self) -> Any:
        return self.allocator.get_kvcache()

    @property
    def runner(self) -> Any:
        """The target's ModelRunner."""
        return self.scheduler.tp_worker.model_runner

    # Break and mend

    def around(self, part: Any, name: str, broken: Callable[..., Any]) -> None:
        """Replace `part.name` by `broken(original, *args)`. `part`: an object, a class or a module."""
        original = getattr(part, name)
        own = vars(part).get(name)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return broken(original, *args, **kwargs)

        def undo() -> None:
            if own is None:
                delattr(part, name)
            else:
                setattr(part, name, own)

        setattr(part, name, replacement)
        self._undo.append(undo)

    def mend(self) -> list[dict[str, Any]]:
        """Put SGLang's own code back. Returns when the fault struck."""
        while self._undo:
            self._undo.pop()()
        strikes, self.strikes = self.strikes, []
        return strikes

    def strike(self, what: str) -> None:
        """The fault takes effect now: after the forwards that each runner has launched."""
        forwards = {m.identity.role: m.forward_ct for m in context.managers}
        self.strikes.append({"what": what, "forwards": forwards})

    @property
    def struck(self) -> bool:
        return bool(self.strikes)

    def renew_scenes(self) -> None:
        """Reports show the surroundings of the first causes of a process. Each fault is to be the first one."""
        for manager in context.managers:
            manager.violations.renew_scenes()

    # What faults look for

    def running(self, name: str) -> Any | None:
        """The request of this name that decodes now."""
        requests = self.scheduler.running_batch.reqs
        return next((r for r in requests if r.rid == name and not r.finished()), None)

    def slots_of(self, request: Any, count: int | None = None) -> torch.Tensor:
        """Full slots of its first `count` tokens, by default of all whose K and V a forward has stored."""
        count = request.kv_committed_len - 2 if count is None else count
        return self.rows.req_to_token[request.req_pool_idx, :count].long().clone()

    def hand_out_next(self, slots: torch.Tensor, allocator: Any = None) -> None:
        """Free slots come first in the free list. Their order is no promise of SGLang's."""
        allocator = self.allocator if allocator is None else allocator
        allocator.merge_and_sort_free()
        free = allocator.free_pages
        chosen = torch.isin(free, slots.to(free.dtype))
        allocator.free_pages = torch.cat([free[chosen], free[~chosen]])

    def hand_to(self, name: str, slots: torch.Tensor, allocator: Any = None) -> None:
        """`hand_out_next`, when the request of this name comes: a free may wait for the end of its group."""

        def alloc(original: Callable[..., Any], requests: list[Any]) -> Any:
            if any(r.rid == name and r.req_pool_idx is None for r in requests):
                self.hand_out_next(slots, allocator)
            return original(requests)

        self.around(self.rows, "alloc", alloc)

    def store(self, pool: Any, slots: torch.Tensor, value: float) -> None:
        """What a late transfer does: bytes of every layer, without a forward."""
        for buffer in _buffers(pool):
            buffer[slots] = value

    @contextmanager
    def without(self, part: Any, name: str) -> Iterator[None]:
        """`part.name` does nothing inside."""
        before = len(self._undo)
        self.around(part, name, lambda original, *args, **kwargs: None)
        try:
            yield
        finally:
            while len(self._undo) > before:
                self._undo.pop()()


def _buffers(pool: Any) -> Sequence[torch.Tensor]:
    pool = getattr(pool, "full_kv_pool", pool)
    if hasattr(pool, "kv_buffer"):  # MLA
        return pool.kv_buffer
    return [*pool.k_buffer, *pool.v_buffer]
