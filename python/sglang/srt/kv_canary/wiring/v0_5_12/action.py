"""Hooks for SGLANG_KV_CANARY_ACTION=abort. Without it they do nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ...config import Action
from ..containment.agreed import AgreedContainment
from ..containment.bell import Bell
from ..containment.parked_pages import ParkedPages
from ..containment.rank_group import RankGroup
from ..context import context
from ..guard import attempt_aside, guarded, guarded_aside
from ..hook_spec import HookSpec, HookType
from ..scheduler import after_idle
from .cached_prefixes import prefixes_of
from .containment import Containment
from .owned_slots import OwnedSlots
from .withheld_slots import WithheldSlots, allocators_by_kind

logger = logging.getLogger(__name__)


@guarded
def _after_scheduler_init(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    manager = context.target
    if manager is None or manager.config.action is not Action.ABORT:
        return
    args = scheduler.server_args
    prefixes = prefixes_of(scheduler.tree_cache)
    why, ranks, bell = _why_reported_only(args, prefixes, scheduler), None, None
    if why is None and shares_requests(args):
        ranks = RankGroup(scheduler.tp_cpu_group)
        if (bell := Bell.hang(ranks)) is None:
            why = SEVERAL_HOSTS
    if why is not None:
        logger.warning("kv-canary: SGLANG_KV_CANARY_ACTION=abort: %s", why)
        return
    allocator = scheduler.token_to_kv_pool_allocator
    allocators = allocators_by_kind(allocator)
    alone = Containment(
        scheduler=scheduler,
        manager=manager,
        desk=manager.expect_action(),
        prefixes=prefixes,
        withheld=WithheldSlots(allocators),
        owned=OwnedSlots(allocator, manager.plan_input.req_to_token),
        speaks=ranks is None or ranks.rank == 0,
    )
    if ranks is None:
        context.containment = alone
    else:
        context.containment = AgreedContainment(alone, ranks, bell, ParkedPages(allocators))
    context.starts_of = _starts_of


SEVERAL_HOSTS = "findings are reported only, because the tensor-parallel ranks are on several hosts"


def shares_requests(args: Any) -> bool:
    """Whether several ranks serve the same requests."""
    return args.tp_size > 1 and not args.enable_dp_attention


def _why_reported_only(args: Any, prefixes: Any, scheduler: Any) -> str | None:
    """Where an action would be wrong or is not known to be right. None: findings end their readers."""
    if args.disaggregation_mode != "null":
        return "a decode server ends requests whose KV arrives damaged. Other findings on this server are reported only"
    if args.pp_size > 1:
        return "findings are reported only, because pipeline stages act in different steps"
    if args.enable_dp_attention and args.tp_size != args.dp_size:
        return (
            "findings are reported only, because with data-parallel attention several ranks share the requests of one "
            "of many schedulers"
        )
    if args.nnodes > 1 and args.tp_size > 1:
        return SEVERAL_HOSTS
    if shares_requests(args) and args.scheduler_recv_interval > 1:
        return (
            "findings are reported only, because with --scheduler-recv-interval above 1 tensor-parallel ranks do not "
            "speak to each other in every step"
        )
    if args.enable_streaming_session:
        return "findings are reported only, because streaming sessions keep KV between requests"
    if prefixes is None:
        name = type(scheduler.tree_cache).__name__
        return f"findings are reported only, because nothing can be dropped from the prefix cache {name}"
    if any(group.stride != 1 for group in context.target.groups):
        return (
            "findings are reported only, because the pool has slots that stand for several tokens"
        )
    return None


def _starts_of(batch: Any) -> list[int]:
    """The first position that each request of the batch computes."""
    if batch.forward_mode.is_extend() and batch.prefix_lens is not None:
        return batch.prefix_lens
    return (batch.seq_lens_cpu - 1).tolist()


def _around_recv_requests(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    containment = context.containment
    if containment is None:
        return original(*a, **k)
    with containment.receiving():
        requests = original(*a, **k)
    _between_steps(containment)
    return requests


@guarded_aside
def _between_steps(containment: Any) -> None:
    containment.between_steps()


def _around_broadcast(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    if (bell := getattr(context.containment, "bell", None)) is None:
        return original(*a, **k)
    return bell.around_broadcast(original, *a, **k)


@guarded
def _after_cache_unfinished(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """SGLang caches nothing of such a request. The next chunk of its prompt needs the slots of this one."""
    containment = context.containment
    if containment is not None and request.skip_radix_cache_insert:
        row = containment.rows[request.req_pool_idx, : len(request.fill_ids)]
        request.prefix_indices = row.to(dtype=torch.int64, copy=True)


@guarded_aside
def _before_row_free(_: Any, request: Any, *__: Any, **___: Any) -> None:
    if context.containment is not None and request.req_pool_idx is not None:
        context.containment.note_finished(request)


def _around_release(original: Callable[..., Any], request: Any, *a: Any, **k: Any) -> Any:
    containment = context.containment
    careful = None if containment is None else attempt_aside(containment.releasing, request)
    with careful or nullcontext():
        return original(request, *a, **k)


@guarded_aside
def _before_idle(scheduler: Any) -> None:
    if context.containment is not None and scheduler.is_fully_idle():
        after_idle(None, scheduler)
        context.containment.on_idle()


@guarded
def _after_clear(_: Any, allocator: Any) -> None:
    if context.containment is not None:
        context.containment.after_clear(allocator)


def _around_check_pool(
    original: Callable[..., tuple[bool, str]], pool_name: str, available: int, *a: Any, **k: Any
) -> tuple[bool, str]:
    """Withheld slots are neither in use nor a leak."""
    withheld, waits = 0, False
    if context.containment is not None:
        withheld = context.containment.withheld.counts()[pool_name.upper()]
        waits = context.containment.may_miss_slots
    leak, text = original(pool_name, available + withheld, *a, **k)
    return (
        leak and not waits,
        f"{text}, {withheld} of the available ones withheld" if withheld else text,
    )


ACTION = "requests that read damage, which SGLANG_KV_CANARY_ACTION=abort ends"
_MEM_CACHE = "sglang.srt.mem_cache"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CHECKER = "sglang.srt.managers.scheduler_runtime_checker_mixin.SchedulerRuntimeCheckerMixin"
HOOKS = (
    HookSpec(f"{_SCHEDULER}.__init__", _after_scheduler_init, HookType.AFTER, ACTION),
    HookSpec(f"{_SCHEDULER}.recv_requests", _around_recv_requests, HookType.AROUND, ACTION),
    HookSpec("sglang.srt.utils.common.broadcast_pyobj", _around_broadcast, HookType.AROUND, ACTION),
    HookSpec(
        f"{_MEM_CACHE}.common.maybe_cache_unfinished_req",
        _after_cache_unfinished,
        HookType.AFTER,
        ACTION,
    ),
    HookSpec(f"{_SCHEDULER}.on_idle", _before_idle, HookType.BEFORE, ACTION),
    HookSpec(f"{_MEM_CACHE}.common.release_kv_cache", _around_release, HookType.AROUND, ACTION),
    HookSpec(
        f"{_MEM_CACHE}.memory_pool.ReqToTokenPool.free", _before_row_free, HookType.BEFORE, ACTION
    ),
    *(
        HookSpec(f"{_MEM_CACHE}.allocator.{name}.clear", _after_clear, HookType.AFTER, ACTION)
        for name in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
    ),
    HookSpec(f"{_CHECKER}._check_pool_invariant", _around_check_pool, HookType.AROUND, ACTION),
)
