"""Hooks for SGLANG_KV_CANARY_ACTION=abort. Without it they do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...plan.speculation import why_draft_is_unchecked
from ..containment.abort import reason_of_waiting
from ..containment.hooks import (
    ACTION,
    after_clear,
    around_check_pool,
    around_recv_requests,
    before_eviction,
)
from ..containment.hooks import HOOKS as SHARED
from ..containment.install import install_containment, is_asked_for
from ..containment.pair_hooks import hold_sends
from ..containment.terms import Terms
from ..context import context
from ..guard import guarded, guarded_aside
from ..hook_spec import HookSpec, HookType
from .hicached_prefixes import around_store_node
from .pairs import for_server_of
from .prefixes import prefixes_of_server
from .session_prefixes import session_of


def _after_scheduler_init(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """Without a guard: the start is not over, and other ranks would wait for one that goes on without the action."""
    if is_asked_for():
        prefixes = prefixes_of_server(scheduler, _requests_of)
        terms = for_server_of(scheduler, TERMS)
        install_containment(scheduler, prefixes, terms, _why_not(scheduler.server_args))
        hold_sends(scheduler)


def _why_not(args: Any) -> str | None:
    if args.enable_streaming_session and args.enable_hierarchical_cache:
        return "findings are reported only, because no test has run it with streaming sessions over HiCache"
    if args.speculative_algorithm is not None and why_draft_is_unchecked(args) is not None:
        return "findings are reported only, because no test has run it with DFLASH or multi-layer EAGLE"
    if args.disaggregation_mode == "decode" and args.enable_hierarchical_cache:
        return (
            "findings are reported only, because no test has run it with HiCache on a decode server"
        )
    return None


def _requests_of(scheduler: Any) -> Iterator[Any]:
    batches = [scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch]
    if scheduler.pp_size > 1:
        batches += [*scheduler.running_mbs, *scheduler.mbs]
    for batch in batches:
        if batch is not None:
            yield from batch.reqs
    yield scheduler.chunked_req


def _end_waiting(scheduler: Any, request: Any, why: str) -> None:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if scheduler.enable_hicache_storage:
        scheduler.tree_cache.release_aborted_request(request.rid)
    reason = reason_of_waiting(why)
    answer = AbortReq(finished_reason=reason, rid=request.rid)
    scheduler.send_to_tokenizer.send_output(answer, request)
    if session_of(request) is not None:  # its next turn may begin
        request.finished_reason = FINISH_ABORT(reason["message"])
        request.session.abort_req()


@guarded
def _after_cache_unfinished(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """SGLang caches nothing of such a request. The next chunk of its prompt needs the slots of this one."""
    containment = context.containment
    if containment is not None and request.skip_radix_cache_insert:
        row = containment.rows[request.req_pool_idx, : len(request.fill_ids)]
        request.prefix_indices = row.to(dtype=torch.int64, copy=True)


@guarded_aside
def _before_turn_is_kept(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """Its row is not freed: the session keeps it."""
    if context.containment is not None and session_of(request) is not None:
        context.containment.note_finished(request)


TERMS = Terms(lambda request: request.kv_allocated_len, _requests_of, _end_waiting)
_MEM_CACHE = "sglang.srt.mem_cache"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CHECKER = "sglang.srt.managers.scheduler_runtime_checker_mixin.SchedulerRuntimeCheckerMixin"
HOOKS = (
    *SHARED,
    HookSpec(f"{_SCHEDULER}.__init__", _after_scheduler_init, HookType.AFTER, ACTION),
    HookSpec(
        f"{_SCHEDULER}.recv_requests",
        around_recv_requests,
        HookType.AROUND,
        ACTION,
        only_with="ACTION",
    ),
    HookSpec(
        f"{_MEM_CACHE}.common.maybe_cache_unfinished_req",
        _after_cache_unfinished,
        HookType.AFTER,
        ACTION,
        only_with="ACTION",
    ),
    HookSpec(
        "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
        _before_turn_is_kept,
        HookType.BEFORE,
        ACTION,
    ),
    HookSpec(
        f"{_MEM_CACHE}.hiradix_cache.HiRadixCache.write_backup_storage",
        around_store_node,
        HookType.AROUND,
        ACTION,
    ),
    HookSpec(
        f"{_MEM_CACHE}.hiradix_cache.HiRadixCache.check_hicache_events",
        before_eviction,  # here, too, so that requests are admitted by the right sizes
        HookType.AFTER,
        ACTION,
    ),
    HookSpec(
        f"{_MEM_CACHE}.hiradix_cache.HiRadixCache.evict",
        before_eviction,
        HookType.BEFORE,
        ACTION,
    ),
    *(
        HookSpec(f"{_MEM_CACHE}.allocator.{name}.clear", after_clear, HookType.AFTER, ACTION)
        for name in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
    ),
    HookSpec(
        f"{_CHECKER}._check_pool_invariant",
        around_check_pool,
        HookType.AROUND,
        ACTION,
        only_with="ACTION",
    ),
)
