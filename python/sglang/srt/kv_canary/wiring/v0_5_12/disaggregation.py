"""Hooks on prefill-decode disaggregation. Records travel with KV. What arrives is checked before it is cached."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...plan.anchor import anchor_of
from ...plan.arrival import Arrival
from ...pool_patcher.buf_info_splice import plain_lists
from ...runner.manager import CanaryManager
from ...transfer.layout import TransferLayout, page_bytes, transferred_records
from ...transfer.notice import Notice
from ..anchors import update_anchors
from ..context import context
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from ..releases import release
from ..scheduler import ENDED
from .mooncake import TRANSFERS

logger = logging.getLogger(__name__)

_COPY = "_kv_canary_records"  # of a retracted request, beside SGLang's own copy of its KV


def _around_init_kv_manager(original: Callable[..., Any], queue: Any) -> Any:
    """The lists of KV stay SGLang's own. Peers pair them by position."""
    if not context.active:
        return original(queue)
    with plain_lists(queue.token_to_kv_pool):
        kv_manager = original(queue)
    from . import mooncake

    if kv_manager.disaggregation_mode.value == "prefill":
        mooncake.attach_sender(kv_manager, _layout_of(context.target, kv_manager.kv_args.page_size))
    else:
        mooncake.attach_receiver(kv_manager, context.notices)
        context.target.expect_arrivals(kv_manager.kv_args.page_size)
    return kv_manager


def _layout_of(manager: CanaryManager, page_size: int) -> TransferLayout:
    from sglang.srt.distributed import get_pp_group
    from sglang.srt.layers.dp_attention import get_attention_tp_size

    return TransferLayout.of(
        manager.groups,
        page_size,
        manager.config.content_mode,
        get_attention_tp_size(),
        get_pp_group().world_size,
    )


def _after_state_args(_: Any, kv_args: Any, *__: Any, **___: Any) -> None:
    """Register the records as the state's last component. It has no type, so SGLang does not send it."""
    if not context.active:
        return
    manager, page_size = context.target, kv_args.page_size
    buffers = [records for _, records in transferred_records(manager.groups)]
    kv_args.state_data_ptrs.append([records.data_ptr() for records in buffers])
    kv_args.state_data_lens.append([records.nbytes for records in buffers])
    kv_args.state_item_lens.append([page_bytes(page_size)] * len(buffers))
    kv_args.state_dim_per_tensor.append(_layout_of(manager, page_size).to_wire())


@guarded
def _after_pre_alloc(_: Any, queue: Any, *__: Any, **___: Any) -> None:
    for manager in context.managers:
        manager.settle_slots()


@guarded
def _after_pop_transferred(requests: Any, queue: Any, *_: Any, **__: Any) -> None:
    if context.active and requests:
        _take_in(queue.scheduler, requests, [_arrival_of(queue, request) for request in requests])


def _take_in(scheduler: Any, requests: Sequence[Any], arrivals: Sequence[Arrival]) -> None:
    """A step of its own. What it finds is about these requests, as long as they keep their rows."""
    manager = context.target
    with _on_forward_stream(scheduler, manager):
        update_anchors(context.managers, requests)
        rows = [
            (arrival.row, request.rid) for arrival, request in zip(arrivals, requests, strict=True)
        ]
        context.recorder.begin_step(rows, has_result=False)
        try:
            manager.note_arrivals(arrivals)
        finally:
            context.recorder.end_step()


def _arrival_of(queue: Any, request: Any) -> Arrival:
    from sglang.srt.disaggregation.decode import _is_fake_transfer

    if _is_fake_transfer(request, queue.scheduler.server_args):
        return _arrival(request, Notice("", False, False))
    notice = context.notices.take(request.bootstrap_room)
    where = f"{request.bootstrap_host}:{request.bootstrap_port}"
    if notice is None:
        notice = Notice(where, False, False, "it has no canary of this kind")
    if notice.why and (where, notice.why) not in context.told:
        context.told.add((where, notice.why))
        what = "the bytes of KV" if notice.has_records else "KV"
        logger.warning(
            "kv-canary: %s from the prefill server at %r is not checked on arrival: %r. Later reads are",
            what,
            where,
            notice.why,
        )
    return _arrival(request, notice)


def _arrival(request: Any, notice: Notice) -> Arrival:
    """The request's tokens but the last one, whose K and V nobody has computed yet."""
    tokens = (request.origin_input_ids + request.output_ids)[: request.kv_committed_len]
    return Arrival(
        row=request.req_pool_idx,
        first=len(request.prefix_indices),
        tokens=tokens,
        anchor=anchor_of(release().namespace_of(request)),
        has_records=notice.has_records,
        keeps_content=notice.keeps_content,
    )


@contextmanager
def _on_forward_stream(scheduler: Any, manager: CanaryManager) -> Iterator[None]:
    if not manager.state.summary.is_cuda or not scheduler.enable_overlap:
        yield
        return
    with torch.cuda.stream(scheduler.forward_stream):
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        yield


@guarded
def _before_offload(request: Any, req_to_token_pool: Any, *_: Any, **__: Any) -> None:
    """A retracted request's KV waits in host memory. Its records do, too."""
    manager = context.target
    if manager is not None and request.req_pool_idx is not None:
        setattr(request, _COPY, manager.copy_records_out(request.req_pool_idx, request.seqlen - 1))


@guarded
def _after_resume(requests: Any, queue: Any, *_: Any, **__: Any) -> None:
    if not context.active or not requests:
        return
    arrivals = []
    with _on_forward_stream(queue.scheduler, context.target):
        for request in requests:
            copy = request.__dict__.pop(_COPY, None)
            arrival = _arrival(request, Notice("", copy is not None, copy is not None))
            if copy is not None:
                context.target.copy_records_in(arrival.row, arrival.length, copy)
            arrivals.append(arrival)
    _take_in(queue.scheduler, requests, arrivals)


@guarded
def _before_row_free(pool: Any, req: Any, *_: Any, **__: Any) -> None:
    if context.active and req.req_pool_idx is not None:
        context.row_released(req.req_pool_idx)


_DECODE = "sglang.srt.disaggregation.decode"
_QUEUE = f"{_DECODE}.DecodePreallocQueue"
_PREFILL_QUEUE = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
HOOKS = (
    HookSpec(f"{_QUEUE}._init_kv_manager", _around_init_kv_manager, HookType.AROUND, TRANSFERS),
    HookSpec(
        f"{_PREFILL_QUEUE}._init_kv_manager", _around_init_kv_manager, HookType.AROUND, TRANSFERS
    ),
    HookSpec(
        "sglang.srt.disaggregation.utils.setup_state_kv_args",
        _after_state_args,
        HookType.AFTER,
        TRANSFERS,
    ),
    HookSpec(f"{_QUEUE}._pre_alloc", _after_pre_alloc, HookType.AFTER, TRANSFERS),
    HookSpec(
        f"{_DECODE}.DecodeTransferQueue.pop_transferred",
        _after_pop_transferred,
        HookType.AFTER,
        TRANSFERS,
    ),
    HookSpec(f"{_QUEUE}.resume_retracted_reqs", _after_resume, HookType.AFTER, TRANSFERS),
    HookSpec(
        "sglang.srt.managers.schedule_batch.Req.offload_kv_cache",
        _before_offload,
        HookType.BEFORE,
        TRANSFERS,
    ),
    HookSpec(f"{_DECODE}.DecodeReqToTokenPool.free", _before_row_free, HookType.BEFORE, ENDED),
)
