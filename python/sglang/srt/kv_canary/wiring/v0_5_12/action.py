"""Hooks for SGLANG_KV_CANARY_ACTION=abort. Without it they do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..containment.hooks import (
    ACTION,
    after_clear,
    around_check_pool,
    around_recv_requests,
)
from ..containment.hooks import HOOKS as SHARED
from ..containment.install import install_containment, is_asked_for
from ..containment.terms import Terms
from ..context import context
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from .hicached_prefixes import around_store_node
from .prefixes import prefixes_of


@guarded
def _after_scheduler_init(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    if is_asked_for():
        install_containment(scheduler, prefixes_of(scheduler.tree_cache), TERMS)


def _requests_of(scheduler: Any) -> Iterator[Any]:
    for batch in (scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch):
        if batch is not None:
            yield from batch.reqs
    yield scheduler.chunked_req


def _answer_waiting(scheduler: Any, request: Any, reason: dict[str, Any]) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    if scheduler.enable_hicache_storage:
        scheduler.tree_cache.release_aborted_request(request.rid)
    answer = AbortReq(finished_reason=reason, rid=request.rid)
    scheduler.send_to_tokenizer.send_output(answer, request)


@guarded
def _after_cache_unfinished(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """SGLang caches nothing of such a request. The next chunk of its prompt needs the slots of this one."""
    containment = context.containment
    if containment is not None and request.skip_radix_cache_insert:
        row = containment.rows[request.req_pool_idx, : len(request.fill_ids)]
        request.prefix_indices = row.to(dtype=torch.int64, copy=True)


TERMS = Terms(lambda request: request.kv_allocated_len, _requests_of, _answer_waiting)
_MEM_CACHE = "sglang.srt.mem_cache"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CHECKER = "sglang.srt.managers.scheduler_runtime_checker_mixin.SchedulerRuntimeCheckerMixin"
HOOKS = (
    *SHARED,
    HookSpec(f"{_SCHEDULER}.__init__", _after_scheduler_init, HookType.AFTER, ACTION),
    HookSpec(f"{_SCHEDULER}.recv_requests", around_recv_requests, HookType.AROUND, ACTION),
    HookSpec(
        f"{_MEM_CACHE}.common.maybe_cache_unfinished_req",
        _after_cache_unfinished,
        HookType.AFTER,
        ACTION,
    ),
    HookSpec(
        f"{_MEM_CACHE}.hiradix_cache.HiRadixCache.write_backup_storage",
        around_store_node,
        HookType.AROUND,
        ACTION,
    ),
    *(
        HookSpec(f"{_MEM_CACHE}.allocator.{name}.clear", after_clear, HookType.AFTER, ACTION)
        for name in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
    ),
    HookSpec(f"{_CHECKER}._check_pool_invariant", around_check_pool, HookType.AROUND, ACTION),
)
