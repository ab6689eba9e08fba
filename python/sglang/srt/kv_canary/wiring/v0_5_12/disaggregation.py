"""Hooks on prefill-decode disaggregation, and what it asks of this release."""

from __future__ import annotations

from typing import Any

from ..containment.held_arrivals import hold, was_held
from ..context import context
from ..disaggregation import DECODE, transfer_hooks
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from ..record_sender import TRANSFERS
from ..scheduler import ENDED
from ..until_0_5_17.rows import before_row_free
from .pairs import await_end

__all__ = ["HOOKS"]


@guarded
def _before_pop_transferred(queue: Any, *_: Any, **__: Any) -> None:
    if context.active:
        for waiting in queue.queue:
            hold(queue.scheduler, waiting, await_end)


HOOKS = (
    HookSpec(
        f"{DECODE}.DecodeTransferQueue.pop_transferred",
        _before_pop_transferred,
        HookType.BEFORE,
        TRANSFERS,
    ),
    *transfer_hooks(
        "sglang.srt.managers.schedule_batch.Req.offload_kv_cache",
        "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin.process_batch_result_prebuilt",
        was_held,
    ),
    # No subclass of the pool that other servers have
    HookSpec(f"{DECODE}.DecodeReqToTokenPool.free", before_row_free, HookType.BEFORE, ENDED),
)
