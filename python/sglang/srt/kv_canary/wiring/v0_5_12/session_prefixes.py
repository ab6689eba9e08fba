"""Streaming sessions: what they keep between turns lies in rows of their own, outside of the prefix cache.

A session whose row leads to damage gives it back, as SGLang does when a turn is aborted. Its next turn computes all
tokens of the conversation again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..containment.prefixes import Computed, Prefixes

__all__ = ["SessionPrefixes", "session_of"]


def session_of(request: Any) -> str | None:
    """The id of its streaming session."""
    session = request.session
    return session.session_id if session is not None and session.streaming else None


@dataclass(frozen=True, slots=True)
class _Turn:
    """A session's turn that is over."""

    session: str
    row: torch.Tensor  # int32[n]: its slots


@dataclass(slots=True)
class SessionPrefixes:
    """A StreamingSession around another prefix cache. Used from the scheduler's thread, between two steps."""

    scheduler: Any
    inner: Prefixes
    requests_of: Callable[[Any], Iterable[Any]]  # see Terms
    _damaged: set[str] = field(default_factory=set)  # sessions that must give their rows back

    @property
    def can_be_repaired(self) -> bool:
        return self.inner.can_be_repaired

    @property
    def loads_copies(self) -> bool:
        return self.inner.loads_copies

    @property
    def num_cached(self) -> int:
        return len(self.slots())

    @property
    def num_held(self) -> int:
        if not self._damaged:  # as in almost every step
            return self.inner.num_held
        held = {s: len(row) for s, row in self._rows() if s in self._damaged}
        return self.inner.num_held + sum(held.values())

    def slots(self) -> torch.Tensor:
        """Those in rows of running turns belong to these."""
        active = {request.req_pool_idx for request in self._running()}
        kept = [self._own(s) for s in self._kept.values() if s.req_pool_idx not in active]
        cached = self.inner.slots()
        return torch.cat([cached, *(slots.to(cached.device) for slots in kept)])

    def drop(self, slots: Iterable[int] | None, computed: Iterable[Computed] = ()) -> int:
        wanted = None if slots is None else torch.tensor(list(slots), dtype=torch.int64)
        found = {session for session, row in self._rows() if _has_any(row, wanted)}
        self._damaged |= found
        kept = (self._kept.get(session) for session in found)
        count = sum(len(self._own(slot)) for slot in kept if slot is not None)
        dropped = self.inner.drop(None if wanted is None else wanted.tolist(), computed)
        self.free_unheld()
        return count + dropped

    def holds(self, request: Any) -> bool:
        session = session_of(request)
        if session is not None and session in self._kept:
            return session in self._damaged
        return self.inner.holds(request)

    def free_unheld(self) -> None:
        running = {session_of(request) for request in self._running()}
        for session in self._damaged - running:
            self._release(session)
            self._damaged.discard(session)
        self.inner.free_unheld()

    def has_unheld(self) -> bool:
        running = {session_of(request) for request in self._running()}
        return bool(self._damaged - running) or self.inner.has_unheld()

    def pin(self, request: Any) -> None:
        self.inner.pin(request)

    def remember(self, request: Any) -> Any:
        """A session's turn: its slots."""
        if (session := session_of(request)) is None:
            return self.inner.remember(request)
        return _Turn(session, self._row_of(request).clone())

    def slots_of(self, request: Any, start: int) -> list[int]:
        if hasattr(request, "session"):  # it runs
            if session_of(request) is None:
                return self.inner.slots_of(request, start)
            return [slot for slot in self._row_of(request)[start:].tolist() if slot > 0]
        cached = self.inner.slots_of(request, start)  # of a session: what its first turn left there
        if not isinstance(request.slots, _Turn):
            return cached
        kept = [slot for slot in self._still_there(request.slots, start).tolist() if slot > 0]
        return list(dict.fromkeys([*kept, *cached]))

    @property
    def _tree(self) -> Any:
        return self.scheduler.tree_cache

    @property
    def _kept(self) -> dict[str, Any]:
        """The slots of sessions, as SGLang calls what they keep, by session id."""
        return {s: slot for s, slot in self._tree.slots.items() if slot.is_holding_kv}

    def _running(self) -> list[Any]:
        """Requests with a row, finished ones included."""
        requests = (r for r in self.requests_of(self.scheduler) if r is not None)
        return [request for request in requests if request.req_pool_idx is not None]

    def _row(self, row: int, length: int) -> torch.Tensor:
        return self._tree.req_to_token_pool.req_to_token[row, :length]

    def _row_of(self, request: Any) -> torch.Tensor:
        return self._row(request.req_pool_idx, request.kv_allocated_len)

    def _still_there(self, turn: _Turn, start: int) -> torch.Tensor:
        """The slots of `turn` that its session still has. Others may have been handed out since."""
        row = turn.row[start:]
        rows = [row[:0], *(row for session, row in self._rows() if session == turn.session)]
        return row[torch.isin(row, torch.cat(rows))]

    def _own(self, slot: Any) -> torch.Tensor:
        """int64[n]: what `slot` keeps outside of the prefix cache."""
        row = self._row(slot.req_pool_idx, slot.kv_allocated_len)
        return row[slot.cache_protected_len :].long()

    def _rows(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(session, its row). A first turn that runs has no slot yet."""
        for session, slot in self._kept.items():
            yield session, self._row(slot.req_pool_idx, slot.kv_allocated_len)
        for request in self._running():
            if (session := session_of(request)) is not None:
                yield session, self._row_of(request)

    def _release(self, session: str) -> None:
        """Give back the session's row. Slots in it that others have stay theirs: the row may be wrong."""
        slot = self._kept.get(session)
        if slot is None:
            return
        page, mine = self._tree.page_size, self._own(slot)
        others = [self._own(s) for name, s in self._kept.items() if name != session]
        others += [self._row(r.req_pool_idx, r.kv_allocated_len).long() for r in self._running()]
        foreign = torch.cat([self.inner.slots().to(mine.device), *others])
        owned = mine[(mine > 0) & ~torch.isin(mine // page, foreign // page)]
        if len(owned):
            self._tree.token_to_kv_pool_allocator.free(owned)
        slot.kv_allocated_len = slot.cache_protected_len
        self._tree.release_session(session)
        for request in self.scheduler.waiting_queue:  # may have taken the row over
            if session_of(request) == session:
                _start_without_row(request)


def _has_any(row: torch.Tensor, wanted: torch.Tensor | None) -> bool:
    return wanted is None or bool(torch.isin(row.cpu().long(), wanted).any())


def _start_without_row(request: Any) -> None:
    """It takes slots of its own when it is scheduled, as the first turn of a session does."""
    request.req_pool_idx = None
    request.kv_committed_len = request.kv_allocated_len = 0
    request.swa_evicted_seqlen = request.cache_protected_len = 0
    request.swa_uuid_for_lock = request.last_node = None
    request.prefix_indices = torch.empty(0, dtype=torch.int64)
