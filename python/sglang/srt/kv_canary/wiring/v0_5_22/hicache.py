"""Hooks on HiCache: the unified tree that keeps pages in host memory.

SGLang plans a request with its whole cached prefix, and then loads all of it or nothing. So the canary shortens the
prefix while the request is planned. A decode server tells the prefill server what it has. There the canary shortens
the prefix before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..context import context
from ..disaggregation import DECODE
from ..guard import attempt
from ..hicache import LOADED, agreed, start_tier
from ..hook_spec import HookSpec, HookType
from ..releases import release
from ..v0_5_17.hicache import TREE
from ..v0_5_18.hicache import key_of
from ..v0_5_19.hicache import COPIES
from .hicache_beside import refuse_beside_other_pools
from .host_loads import host_slots_of, usable_of, window_slots_of

__all__ = ["HOOKS"]


def _after_init(_: Any, tree: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER UnifiedRadixCache.init_hicache: the host pools exist and are empty.

    A decode server has them for retracted requests, too. Their records wait with the request.
    """
    args = release().settled(server_args)
    if not context.active or not args.enable_hierarchical_cache:
        return
    refuse_beside_other_pools(tree.host_pool_group, args)
    # A decode server takes up a request when its load is over, and decodes others meanwhile.
    in_background = args.disaggregation_mode == "decode"
    start_tier(tree.host_pool_group, host_slots_of, in_background, window_slots_of)


def _around_admission(
    original: Callable[..., Any],
    adder: Any,
    req: Any,
    *,
    host_hit_length: int,
    swa_host_hit_length: int,
    **more: Any,
) -> Any:
    """Load the prefix up to the first page that has no record or is damaged. All ranks load the same."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    hits = {"host_hit_length": host_hit_length, "swa_host_hit_length": swa_host_hit_length}
    admission = original(adder, req, **hits, **more)
    if context.host_tier is None or isinstance(admission, AddReqResult) or not any(hits.values()):
        return admission
    if not _shorten_to_usable(adder.tree_cache, req):
        return admission
    hits = {name: getattr(req, name) for name in hits}
    return original(adder, req, **hits, **more)


def _shorten_to_usable(tree: Any, req: Any) -> bool:
    """Whether `req` loads less now. What a shorter prefix would load is compared, too: it may have another window."""
    shortened = False
    while req.host_hit_length or req.swa_host_hit_length:
        usable, end = _usable_of(tree, req, req.prefix_len)
        if usable == end:
            break
        attempt(_shorten, tree, req, usable)
        shortened = True
    return shortened


def _around_promise(original: Callable[..., Any], queue: Any, req: Any, match: Any) -> Any:
    """AROUND the last step before a decode server tells the prefill server how much of the prompt it has.

    What is promised is loaded while the rest is sent, in one piece, or SGLang fails the request. It loads no piece that
    is shorter than its threshold.
    """
    if context.host_tier is not None and match is not None and match.l2_host_hit_length:
        end, total = _usable_of(queue.tree_cache, req, match.l1_prefix_len)
        if end != total:
            usable = end - match.l1_prefix_len
            usable = usable if usable >= queue.tree_cache.load_back_threshold else 0
            match.l2_host_hit_length = req.host_hit_length = usable
            match.l3_storage_hit_length, match.last_host_node = 0, None  # it continues the whole
    return original(queue, req, match)


def _usable_of(tree: Any, req: Any, on_device: int) -> tuple[int, int | None]:
    """(tokens of the prefix of `req` that may be used, in whole pages and by all ranks; tokens that it has).

    `on_device`: how many of them the device pool holds. They may be used.
    """
    usable, end = attempt(usable_of, tree, req.best_match_node, on_device) or (0, None)
    usable = agreed(tree, usable)
    return max(usable - usable % tree.page_size, on_device), end


def _shorten(tree: Any, req: Any, usable: int) -> None:
    """Let `req` load no more than the first `usable` tokens of its prefix. After an error it loads nothing."""
    req.best_match_node, req.host_hit_length = req.last_node, 0
    req.swa_host_hit_length = req.mamba_host_hit_length = 0
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

    if usable <= req.prefix_len:
        return
    end = usable + tree.tree_core.is_eagle  # EAGLE's keys are pairs of tokens
    key = key_of(req, req.full_untruncated_fill_ids[:end])
    found = tree.match_prefix(MatchPrefixParams(key=key))
    req.best_match_node, req.host_hit_length = found.best_match_node, found.host_hit_length
    req.swa_host_hit_length = found.swa_host_hit_length
    req.mamba_host_hit_length = found.mamba_host_hit_length


HOOKS = (
    HookSpec(f"{TREE}.init_hicache", _after_init, HookType.AFTER, LOADED),
    HookSpec(
        "sglang.srt.managers.schedule_policy.PrefillAdder._select_prefill_admission",
        _around_admission,
        HookType.AROUND,
        LOADED,
    ),
    HookSpec(
        f"{DECODE}.DecodePreallocQueue._start_hicache_prefetch",
        _around_promise,
        HookType.AROUND,
        LOADED,
    ),
    *COPIES,
)
