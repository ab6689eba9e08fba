"""Rows that are given back or rewritten, by requests and by sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..context import context
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from ..scheduler import ENDED, REWRITTEN, around_cache_unfinished

__all__ = ["row_hooks"]


@guarded
def _before_rows_free(_: Any, rows: Iterable[int], *a: Any, **k: Any) -> None:
    """Rows of requests and of sessions alike."""
    if context.active:
        for row in rows:
            context.row_released(row)


@guarded
def _before_session_trim(_: Any, kv: Any, target: int, end: int) -> None:
    """A session keeps its row but gives back the part after `target`. Its next turn allocates that part again."""
    if context.active and end > target and kv.req_pool_idx is not None:
        context.row_shortened(kv.req_pool_idx)


def row_hooks(rewrites: str) -> tuple[HookSpec, ...]:
    """The hooks. `rewrites`: the function that caches what a running request has computed."""
    sessions = "sglang.srt.session.streaming_session.StreamingSession"
    before = (
        ("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows", _before_rows_free),
        (f"{sessions}._free_kv_aligned", _before_session_trim),
    )
    return (
        *(HookSpec(target, fn, HookType.BEFORE, ENDED) for target, fn in before),
        HookSpec(rewrites, around_cache_unfinished, HookType.AROUND, REWRITTEN),
    )
