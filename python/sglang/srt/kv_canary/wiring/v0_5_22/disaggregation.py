"""Hooks on prefill-decode disaggregation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..containment.held_arrivals import hold, was_held
from ..context import context
from ..disaggregation import DECODE, transfer_hooks
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from ..record_sender import TRANSFERS
from ..scheduler import ENDED
from .pairs import status_now

__all__ = ["HOOKS"]


@guarded
def _before_row_free(_: Any, request: Any, *a: Any, **k: Any) -> None:
    """The rows of a decode server are no subclass of those of other servers."""
    if context.active and request.kv.req_pool_idx is not None:
        context.row_released(request.kv.req_pool_idx)


@guarded
def _before_pop_transferred(queue: Any, *_: Any, **__: Any) -> None:
    if context.active:
        for waiting in queue.queue:
            is_whole = functools.partial(_has_its_prefix, queue, waiting)
            hold(queue.scheduler, waiting, status_now, is_whole)


def _has_its_prefix(queue: Any, waiting: Any) -> bool:
    """Whether what HiCache loads for the request is in its row. It is put there when SGLang would take it up."""
    from sglang.srt.disaggregation.decode_hicache_mixin import HiCacheRestoreResult

    if not queue.scheduler.enable_decode_hicache:
        return True
    if waiting.hicache_restore_status != HiCacheRestoreResult.READY:
        return False
    queue._commit_hicache_local_restore_to_req(waiting)
    return True


def _around_commit(original: Callable[..., Any], queue: Any, waiting: Any) -> None:
    """Once: for the check of what arrived, or without it when SGLang takes the request up."""
    if not context.active or waiting.hicache_restore_lock is not None:
        original(queue, waiting)


HOOKS = (
    HookSpec(
        f"{DECODE}_hicache_mixin.DecodeHiCacheTransferMixin._commit_hicache_local_restore_to_req",
        _around_commit,
        HookType.AROUND,
        TRANSFERS,
    ),
    HookSpec(
        f"{DECODE}.DecodeTransferQueue.pop_transferred",
        _before_pop_transferred,
        HookType.BEFORE,
        TRANSFERS,
    ),
    *transfer_hooks(
        "sglang.srt.mem_cache.common.backup_kv_cache",
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prebuilt",
        was_held,
    ),
    HookSpec(f"{DECODE}.DecodeReqToTokenPool.free", _before_row_free, HookType.BEFORE, ENDED),
)
