"""Rows that are given back or rewritten."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..context import context
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from ..scheduler import ENDED, REWRITTEN, around_cache_unfinished


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


# 0.5.19 has them, too.
ROW_HOOKS = (
    HookSpec(
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows",
        _before_rows_free,
        HookType.BEFORE,
        ENDED,
    ),
    HookSpec(
        "sglang.srt.session.streaming_session.StreamingSession._free_kv_aligned",
        _before_session_trim,
        HookType.BEFORE,
        ENDED,
    ),
)
HOOKS = (
    *ROW_HOOKS,
    HookSpec(
        "sglang.srt.mem_cache.common.checkpoint_kv_cache",
        around_cache_unfinished,
        HookType.AROUND,
        REWRITTEN,
    ),
)
