"""Hooks for SGLANG_KV_CANARY_ACTION=abort. Without it they do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..containment.abort import reason_of_waiting
from ..containment.hooks import (
    ACTION,
    after_clear,
    around_check_pool,
    around_recv_requests,
)
from ..containment.hooks import HOOKS as SHARED
from ..containment.install import install_containment, is_asked_for
from ..containment.pair_hooks import hold_sends
from ..containment.terms import Terms
from ..context import context
from ..guard import attempt_aside, guarded_aside
from ..hook_spec import HookSpec, HookType
from ..releases import release
from .namespaces import Namespaces, prefixes_of
from .pairs import for_server_of


def _after_scheduler_init(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """Without a guard: the start is not over, and other ranks would wait for one that goes on without the action."""
    terms = for_server_of(
        scheduler, TERMS
    )  # chains of a pair begin alike, with and without the action
    if is_asked_for():
        install_containment(scheduler, prefixes_of(scheduler), terms, _why_not(scheduler))
        hold_sends(scheduler)


def _why_not(scheduler: Any) -> str | None:
    """What is not known to be right on these releases. None: nothing."""
    args = release().settled(scheduler.server_args)
    if not (scheduler.spec_algorithm.is_none() or _has_run_with(scheduler.spec_algorithm, args)):
        why = (
            "no test has run it with speculation other than EAGLE, EAGLE3, NGRAM and FROZEN_KV_MTP"
        )
    elif args.enable_streaming_session:
        why = "streaming sessions keep KV between requests, and no test has run it with them"
    elif args.enable_unified_memory:
        why = "pages of unified memory move, and a slot that is withheld does not keep the damaged memory"
    elif args.enable_lmcache:
        why = "LMCache keeps copies of what was damaged, for other servers, too, and can drop no single one"
    else:
        return None
    return f"findings are reported only, because on this release {why}"


def _has_run_with(algorithm: Any, args: Any) -> bool:
    """SGLang counts FROZEN_KV_MTP as EAGLE."""
    return algorithm.is_ngram() or (algorithm.is_eagle() and not args.enable_multi_layer_eagle)


def _requests_of(scheduler: Any) -> Iterator[Any]:
    yield from scheduler.collect_inflight_reqs()
    yield scheduler.chunked_req


def _end_waiting(scheduler: Any, request: Any, why: str) -> None:
    from sglang.srt.managers.scheduler import _make_abort_req

    scheduler._release_aborted_request(request)
    send = getattr(scheduler, "send_abort_output", None)  # from 0.5.23 on
    send = send or scheduler.ipc_channels.send_to_tokenizer.send_output
    send(_make_abort_req(request, finished_reason=reason_of_waiting(why)), request)


@guarded_aside
def _before_queue(_: Any, request: Any, *__: Any, **___: Any) -> None:
    prefixes = None if context.containment is None else context.containment.prefixes
    if isinstance(prefixes, Namespaces):
        prefixes.admit(request)


def _around_slide(original: Callable[..., Any], tree: Any, request: Any, *a: Any, **k: Any) -> Any:
    """What leaves its window by a wrong row are slots of others. Its own are freed when it ends."""
    containment = context.containment
    if containment is not None and containment.has_wrong_row(request):
        return None
    return original(tree, request, *a, **k)


def _around_store(original: Callable[..., Any], tree: Any, node: int) -> None:
    """AROUND the start of a store: nothing of a dropped namespace is stored."""
    prefixes = getattr(context.containment, "prefixes", None)
    if not isinstance(prefixes, Namespaces) or attempt_aside(_is_reached, prefixes, tree, node):
        original(tree, node)


def _is_reached(prefixes: Namespaces, tree: Any, node: int) -> bool:
    extra_key, _ = tree.tree_core.prefetch_anchor_info(node)
    return not prefixes.is_dropped(extra_key)


TERMS = Terms(lambda request: request.kv.kv_allocated_len, _requests_of, _end_waiting)
_ALLOCATOR = "sglang.srt.mem_cache.allocator"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
HOOKS = (
    *SHARED,
    HookSpec(f"{_SCHEDULER}.__init__", _after_scheduler_init, HookType.AFTER, ACTION),
    HookSpec(f"{_SCHEDULER}._add_request_to_queue", _before_queue, HookType.BEFORE, ACTION),
    HookSpec(
        f"{_COMPONENTS}.request_receiver.SchedulerRequestReceiver.recv_requests",
        around_recv_requests,
        HookType.AROUND,
        ACTION,
        only_with="ACTION",
    ),
    HookSpec(
        "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.evict_sliding_windows",
        _around_slide,
        HookType.AROUND,
        ACTION,
    ),
    HookSpec(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.write_backup_storage",
        _around_store,
        HookType.AROUND,
        ACTION,
    ),
    *(
        HookSpec(f"{_ALLOCATOR}.{name}.clear", after_clear, HookType.AFTER, ACTION)
        for name in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
    ),
    HookSpec(
        f"{_COMPONENTS}.invariant_checker.SchedulerInvariantChecker._check_pool_invariant",
        around_check_pool,
        HookType.AROUND,
        ACTION,
        only_with="ACTION",
    ),
)
