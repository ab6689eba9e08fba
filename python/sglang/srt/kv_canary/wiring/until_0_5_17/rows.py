"""Rows that are given back or rewritten, by requests and by sessions."""

from __future__ import annotations

from typing import Any

from ..context import context
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from ..scheduler import ENDED, REWRITTEN, around_cache_unfinished


@guarded
def before_row_free(pool: Any, req: Any, *a: Any, **k: Any) -> None:
    if context.active and req.req_pool_idx is not None:
        context.row_released(req.req_pool_idx)


@guarded
def _before_session_release(sessions: Any, session_id: str) -> None:
    """A streaming session puts its row on the pool's free list itself."""
    slot = sessions.slots.get(session_id)
    if context.active and slot is not None and slot.is_holding_kv:
        context.row_released(slot.req_pool_idx)


@guarded
def _before_session_trim(_: Any, row: int, target: int, end: int) -> None:
    """A session keeps its row but gives back the part after `target`. Its next turn allocates that part again."""
    if context.active and end > target:
        context.row_shortened(row)


_SESSIONS = "sglang.srt.session.streaming_session.StreamingSession"
_BEFORE = (
    ("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free", before_row_free),
    (f"{_SESSIONS}.release_session", _before_session_release),
    (f"{_SESSIONS}._free_kv_aligned", _before_session_trim),
)
HOOKS = (
    *(HookSpec(target, fn, HookType.BEFORE, ENDED) for target, fn in _BEFORE),
    HookSpec(
        "sglang.srt.mem_cache.common.maybe_cache_unfinished_req",
        around_cache_unfinished,
        HookType.AROUND,
        REWRITTEN,
    ),
)
