"""Hooks on prefill-decode disaggregation."""

from __future__ import annotations

from typing import Any

from ..context import context
from ..disaggregation import DECODE, transfer_hooks
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from ..scheduler import ENDED

__all__ = ["HOOKS"]


@guarded
def _before_row_free(_: Any, request: Any, *a: Any, **k: Any) -> None:
    """The rows of a decode server are no subclass of those of other servers."""
    if context.active and request.kv.req_pool_idx is not None:
        context.row_released(request.kv.req_pool_idx)


HOOKS = (
    *transfer_hooks("sglang.srt.mem_cache.common.backup_kv_cache"),
    HookSpec(f"{DECODE}.DecodeReqToTokenPool.free", _before_row_free, HookType.BEFORE, ENDED),
)
