"""Prefill-decode disaggregation. Records travel with KV. What arrives is checked before it is cached."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ..errors import startup_error
from ..plan.speculation import checks_draft, why_draft_is_unchecked
from ..pool_patcher.buf_info_splice import plain_lists
from ..transfer.layout import TransferLayout, page_bytes, transferred_records
from ..transfer.notice import NO_TOKEN, Notice
from .adapter_names import AdapterNames
from .adapters import knows_adapter
from .arrivals import Extent, arrival_of, as_arrival, extent_of, take_in
from .context import context
from .forward_stream import await_forwards, on_forward_stream
from .guard import attempt, guarded, guarded_aside
from .hook_spec import HookSpec, HookType
from .images import image_numbers
from .record_sender import TRANSFERS
from .releases import release
from .swept_slots import wait_for_sweep

__all__ = ["COPY", "DECODE", "PREFILL", "RecordComponent", "transfer_hooks"]

_WITH_INDEXER = ("DSATokenToKVPool", "NSATokenToKVPool")  # the latter on 0.5.12.post1
_LATENT = ("MLATokenToKVPool", *_WITH_INDEXER)
_PLAIN_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")
_HYBRID = "HybridLinearKVPool"
_DRAFT_POOLS = ("MHATokenToKVPool", *_LATENT, _HYBRID)
_POOLS = (*_DRAFT_POOLS, "SWAKVPool")
_NO_NAME = "that server does not know the name of the request's LoRA adapter"
_NOT_CHECKING = "its canary has stopped checking"
COPY = "_kv_canary_records"  # of a retracted request, beside SGLang's own copy of its KV


def _around_init_kv_manager(original: Callable[..., Any], queue: Any) -> Any:
    """The lists of KV stay SGLang's own. Peers pair them by position."""
    if not context.active:
        return original(queue)
    _refuse_unknown_pool(queue.token_to_kv_pool)
    args = release().settled(queue.scheduler.server_args)
    _refuse_cached_states(args, queue.token_to_kv_pool)
    _refuse_hybrid_stages(args, queue.token_to_kv_pool)
    _refuse_mixed_up_stages(args, queue)
    with ExitStack() as plain:
        plain.enter_context(plain_lists(queue.token_to_kv_pool))
        if queue.draft_token_to_kv_pool is not None:
            # SGLang sends the full slots of a draft model alone, so its SWA window would not come along.
            _refuse_unknown_pool(
                queue.draft_token_to_kv_pool, _DRAFT_POOLS, "draft model's KV pool"
            )
            plain.enter_context(plain_lists(queue.draft_token_to_kv_pool))
        kv_manager = original(queue)
    cuts_rows = _takes_rows_for_heads(kv_manager, queue.token_to_kv_pool)
    if cuts_rows:
        _refuse_unsent_rows(kv_manager)
    backend = queue.scheduler.server_args.disaggregation_transfer_backend
    transport = release().transfers.transports[backend]()
    page_size = kv_manager.kv_args.page_size
    if queue.scheduler.enable_lora:
        context.adapters = AdapterNames(queue.scheduler.tp_worker.model_runner.lora_manager)
    if kv_manager.disaggregation_mode.value == "prefill":
        layout = replace(_layout(page_size), cuts_rows=int(cuts_rows))
        transport.attach_sender(kv_manager, layout)
        context.sends_kv = True
    else:
        transport.attach_receiver(kv_manager, context.notices)
        for manager in (context.target, *context.drafts):
            manager.expect_arrivals(page_size)
    return kv_manager


def _refuse_unknown_pool(pool: Any, known: tuple[str, ...] = _POOLS, what: str = "KV pool") -> None:
    """Slots that stand for several tokens are sent in parts."""
    name = type(pool).__name__
    if name not in known:
        raise startup_error(
            f"transfers of the {what} {name} are not covered (known: {', '.join(known)}).",
            TRANSFERS,
        )
    # Other layers of a hybrid model have no KV. SGLang sends their states apart.
    if name == _HYBRID:
        _refuse_unknown_pool(pool.full_kv_pool, _PLAIN_POOLS, f"full-attention pool in {name}")


def _refuse_cached_states(args: Any, pool: Any) -> None:
    """Newer releases have both for some models. Others refuse it themselves. The role may change while it serves."""
    decodes = args.disaggregation_mode == "decode" or getattr(args, "enable_pd_role_switch", False)
    if not (decodes and args.disaggregation_decode_enable_radix_cache):
        return
    name, why = type(pool).__name__, None
    if name == "SWAKVPool":
        why = (
            "SGLang sends what is not cached of a sliding window, and the check of arrivals takes the whole window for "
            "sent."
        )
    elif name in _WITH_INDEXER and release().transfers.resends_cached_keys():
        why = (
            "this release sends the index keys of a cached prefix again, into pages that other requests read at that "
            "moment. Keys of another forward may differ from them in their last bits."
        )
    if why is not None:
        raise startup_error(f"{why} Remove --disaggregation-decode-enable-radix-cache.", TRANSFERS)


def _refuse_mixed_up_stages(args: Any, queue: Any) -> None:
    """A stage with a draft model sends its KV behind that of its own layers. Latent rows alone are paired rightly."""
    if args.speculative_algorithm is None or args.pp_size == 1:
        return
    for pool in (queue.token_to_kv_pool, queue.draft_token_to_kv_pool):
        name = type(pool).__name__
        if pool is not None and name not in _LATENT:
            raise startup_error(
                f"SGLang itself cannot send {name} from a stage with a draft model. Over Mooncake "
                "get_mha_kv_ptrs_with_pp takes half of a stage's buffers for K, and those of the draft are among them: "
                "V of one layer arrives in another. Over NIXL build_transfer_entry_pairs finds no pairs of layers. "
                "Remove --speculative-algorithm or --pp-size.",
                TRANSFERS,
            )


def _refuse_hybrid_stages(args: Any, pool: Any) -> None:
    if args.pp_size > 1 and type(pool).__name__ == _HYBRID:
        raise startup_error(
            f"no run has checked transfers of pipeline stages with {_HYBRID}. 0.5.12.post1 itself pairs their layers "
            "and states wrongly with those of another number of stages. Remove --pp-size.",
            TRANSFERS,
        )


def _takes_rows_for_heads(kv_manager: Any, pool: Any) -> bool:
    """0.5.12.post1 takes the latent rows of a hybrid model for K in one half of its layers, and V in the other."""
    knows = kv_manager.is_mla_backend or getattr(kv_manager, "is_hybrid_mla_backend", False)
    return type(pool).__name__ == _HYBRID and pool.use_mla and not knows


def _refuse_unsent_rows(kv_manager: Any) -> None:
    count = len(kv_manager.kv_args.kv_data_ptrs)
    if count % 2:
        raise startup_error(
            f"SGLang itself does not send the last of {count} buffers of latent rows of a hybrid model: its "
            "get_mha_kv_ptrs_with_pp takes one half of them for K and the other for V. Install 0.5.22 or later, or "
            "remove --disaggregation-mode.",
            TRANSFERS,
        )


def _layout(page_size: int) -> TransferLayout:
    target, answers, args = context.target, release().transfers, release().server_args()
    drafts = args.speculative_algorithm is not None and checks_draft(args)
    layout = TransferLayout.of(
        target.groups,
        page_size,
        target.config.content_mode,
        *answers.parallelism(),
        [group for draft in context.drafts for group in draft.groups],
    )
    leaves = drafts and not context.drafts and args.pp_size > 1
    speculates = args.speculative_algorithm is not None
    return replace(
        layout,
        heeds_damage=int(answers.heeds_damage),
        leaves_draft=int(leaves),
        unchecked_draft=int(speculates and why_draft_is_unchecked(args) is not None),
    )


class RecordComponent(list[int]):
    """Of the records, in SGLang's lists of states: addresses, or sizes. A state of the pool has a plain list."""


def _after_state_args(_: Any, kv_args: Any, *__: Any, **___: Any) -> None:
    """Register the records as the state's last component. It has no type, so SGLang does not send it."""
    if not context.active:
        return
    page_size = kv_args.page_size
    managers = (context.target, *context.drafts)
    buffers = [records for m in managers for _, records in transferred_records(m.groups)]
    kv_args.state_data_ptrs.append(RecordComponent(records.data_ptr() for records in buffers))
    kv_args.state_data_lens.append(RecordComponent(records.nbytes for records in buffers))
    kv_args.state_item_lens.append(RecordComponent([page_bytes(page_size)] * len(buffers)))
    kv_args.state_dim_per_tensor.append(_layout(page_size).to_wire())


@guarded_aside
def _before_send(scheduler: Any, request: Any, *__: Any, **___: Any) -> None:
    if not context.active:
        return
    room, name, first = request.bootstrap_room, request.rid, request.start_send_idx
    images = context.sent_chunks.images_of(room, name, first)
    if images is None:  # once for all chunks: it goes through the whole prompt
        images = image_numbers(scheduler.model_config, request.origin_input_ids)
    obstacle = _obstacle(request)
    # The last chunk goes when the first token of the answer is known.
    token = request.output_ids[0] if len(request.output_ids) else NO_TOKEN
    context.sent_chunks.note(room, name, first, images, obstacle, token)


def _obstacle(request: Any) -> str:
    """Why the records of `request` say nothing about its KV on another server. "": they do."""
    if not knows_adapter(request):
        return _NO_NAME
    # Other runners follow the one that has lost track at their next forwards only.
    return "" if all(manager.armed for manager in context.managers) else _NOT_CHECKING


@guarded
def _after_pre_alloc(_: Any, queue: Any, request: Any, *__: Any, **___: Any) -> None:
    # The prefill server does not know yet where to write: what is there is about an earlier user of the room.
    # A request that resumes has had its notice.
    if COPY not in request.__dict__:
        context.notices.take(request.bootstrap_room)
    context.check_due_arrivals()
    knows_adapter(request)  # learns the name while the adapter is loaded
    wait_for_sweep()
    for manager in context.managers:
        manager.settle_slots()


@guarded
def _before_offload(request: Any, *_: Any, **__: Any) -> None:
    """A retracted request's KV waits in host memory. Its records do, too."""
    context.check_due_arrivals()
    manager, row = context.target, release().row_of(request)
    if manager is None or manager.arrivals is None or row is None:
        return
    if not manager.armed:  # its records are out of date, and a flush does not reach the copy
        return
    await_forwards()  # the check of its arrival may still wait for one, and has its records
    setattr(request, COPY, manager.arrivals.copy_out(row, request.seqlen - 1))


@guarded
def _after_resume(requests: Any, queue: Any, *_: Any, **__: Any) -> None:
    if not context.active or not requests:
        return
    context.check_due_arrivals()
    arrivals = []
    with on_forward_stream(queue.scheduler, context.target):
        for request in requests:
            copy = request.__dict__.pop(COPY, None)
            notice = Notice("", copy is not None, copy is not None)
            arrival = as_arrival(request, notice, extent_of(request))
            if copy is not None:
                context.target.arrivals.copy_in(arrival.row, arrival.length, copy)
            arrivals.append(arrival)
    take_in(queue.scheduler, requests, arrivals)


def _take_in_new(scheduler: Any, requests: list[Any], extents: list[Extent]) -> None:
    of = zip(requests, extents, strict=True)
    take_in(scheduler, requests, [arrival_of(scheduler, *each) for each in of])


def _may_wait(scheduler: Any) -> bool:
    """Whether the check of an arrival may come after SGLang has sent the first token.

    Nothing reads or changes the slots until then, if no cache gets them and no other rank waits for this one.
    """
    args = release().settled(scheduler.server_args)
    is_cached = args.disaggregation_decode_enable_radix_cache or context.host_tier is not None
    is_paused = getattr(scheduler, "_engine_paused", False)
    return not (is_cached or is_paused or context.containment is not None or args.pp_size > 1)


def _end_at_once(requests: list[Any]) -> bool:
    """The device should have checked a request that is over before it gives its row back: else findings are moot."""
    return any((r.sampling_params.max_new_tokens or 2) <= len(r.output_ids) for r in requests)


@guarded
def _after_first_tokens(*_: Any, **__: Any) -> None:
    context.check_due_arrivals()


DECODE = "sglang.srt.disaggregation.decode"
_QUEUE = f"{DECODE}.DecodePreallocQueue"
_NEXT_BATCH = f"{DECODE}.SchedulerDisaggregationDecodeMixin.get_next_disagg_decode_batch_to_run"
PREFILL = "sglang.srt.disaggregation.prefill"
_PREFILL_QUEUE = f"{PREFILL}.PrefillBootstrapQueue"
_SEND = f"{PREFILL}.SchedulerDisaggregationPrefillMixin.send_kv_chunk"


def transfer_hooks(
    offload: str, first_tokens: str, is_checked: Callable[[Any], bool] = lambda _: False
) -> tuple[HookSpec, ...]:
    """`offload`: what copies a retracted request's KV to host memory. `first_tokens`: what sends those that came with
    KV. `is_checked`: whether a request's KV has been.
    """

    @guarded
    def after_pop_transferred(requests: Any, queue: Any, *_: Any, **__: Any) -> None:
        if not context.active or not requests:
            return
        context.check_due_arrivals()
        new = [request for request in requests if not is_checked(request)]
        if new:
            extents = [extent_of(request) for request in new]
            check = functools.partial(attempt, _take_in_new, queue.scheduler, new, extents)
            context.due_arrivals.append(check)
            if _end_at_once(new) or not _may_wait(queue.scheduler):
                context.check_due_arrivals()

    before, after = HookType.BEFORE, HookType.AFTER
    return (
        *(
            HookSpec(
                f"{queue}._init_kv_manager", _around_init_kv_manager, HookType.AROUND, TRANSFERS
            )
            for queue in (_QUEUE, _PREFILL_QUEUE)
        ),
        *(
            HookSpec(target, function, kind, TRANSFERS)
            for target, function, kind in (
                ("sglang.srt.disaggregation.utils.setup_state_kv_args", _after_state_args, after),
                (_SEND, _before_send, before),
                (f"{_QUEUE}._pre_alloc", _after_pre_alloc, after),
                (f"{DECODE}.DecodeTransferQueue.pop_transferred", after_pop_transferred, after),
                (first_tokens, _after_first_tokens, after),
                (_NEXT_BATCH, _after_first_tokens, after),
                (f"{_QUEUE}.resume_retracted_reqs", _after_resume, after),
                (offload, _before_offload, before),
            )
        ),
    )
