"""Hooks on prefill-decode disaggregation."""

from __future__ import annotations

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
            hold(queue.scheduler, waiting, status_now)


HOOKS = (
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
