"""Hooks on HiCache: the unified tree that keeps pages in host memory.

SGLang plans a request with its whole cached prefix, and then loads all of it or nothing. So the canary shortens the
prefix while the request is planned. A decode server tells the prefill server what it has. There the canary shortens
the prefix before that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..context import context
from ..disaggregation import DECODE
from ..guard import attempt
from ..hicache import HYBRID_CONTROLLER, LOADED, CopyStreams, agreed, copy_hooks, start_tier
from ..hook_spec import HookSpec, HookType
from ..releases import release

if TYPE_CHECKING:
    from ...host_tier.host_tier import HostTier

__all__ = ["HOOKS"]


def _after_init(_: Any, tree: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER UnifiedRadixCache.init_hicache: the host pools exist and are empty.

    A decode server has them for retracted requests, too. Their records wait with the request.
    """
    args = release().settled(server_args)
    if not context.active or not args.enable_hierarchical_cache:
        return
    # A decode server takes up a request when its load is over, and decodes others meanwhile.
    start_tier(tree.host_pool_group, _host_slots_of, args.disaggregation_mode == "decode")


def _host_slots_of(tree: Any, token_ids: list[int]) -> list[int | None]:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    prefixes = getattr(context.containment, "prefixes", None)
    key = RadixKey(array("q", token_ids), getattr(prefixes, "default_key", None))
    found = tree.match_prefix(MatchPrefixParams(key=key))
    return [None] * found.device_prefix_len + _slots_to_load(tree, found.best_match_node).tolist()


def _slots_to_load(tree: Any, node: Any) -> torch.Tensor:
    """int64[n] on the CPU: host slots of the path to `node`, as far as the device pool does not hold it."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.components import CacheTransferPhase

    (full,) = tree.tree_core.build_hicache_transfers(
        ComponentType.FULL, node, CacheTransferPhase.LOAD_BACK
    )
    return full.host_indices


def _around_admission(
    original: Callable[..., Any], adder: Any, req: Any, *, host_hit_length: int, **more: Any
) -> Any:
    """Load the prefix up to the first page that has no record or is damaged. All ranks load the same."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    admission = original(adder, req, host_hit_length=host_hit_length, **more)
    tier = context.host_tier
    if tier is None or not host_hit_length or isinstance(admission, AddReqResult):
        return admission
    tree = adder.tree_cache
    usable, total = _usable_of(tier, tree, req)
    if usable == total:
        return admission
    attempt(_shorten, tree, req, usable)
    return original(adder, req, host_hit_length=req.host_hit_length, **more)


def _around_promise(original: Callable[..., Any], queue: Any, req: Any, match: Any) -> Any:
    """AROUND the last step before a decode server tells the prefill server how much of the prompt it has.

    What is promised is loaded while the rest is sent, in one piece, or SGLang fails the request. It loads no piece that
    is shorter than its threshold.
    """
    tier = context.host_tier
    if tier is not None and match is not None and match.l2_host_hit_length:
        usable, total = _usable_of(tier, queue.tree_cache, req)
        if usable != total:
            usable = usable if usable >= queue.tree_cache.load_back_threshold else 0
            match.l2_host_hit_length = req.host_hit_length = usable
            match.l3_storage_hit_length, match.last_host_node = 0, None  # it continues the whole
    return original(queue, req, match)


def _usable_of(tier: HostTier, tree: Any, req: Any) -> tuple[int, int | None]:
    """(tokens that may be loaded for `req`, in whole pages and by all ranks; tokens that host memory has for it)."""
    usable, total = attempt(_usable_here, tier, tree, req) or (0, None)
    usable = agreed(tree, usable)
    return usable - usable % tree.page_size, total


def _usable_here(tier: HostTier, tree: Any, req: Any) -> tuple[int, int]:
    slots = _slots_to_load(tree, req.best_match_node)
    return tier.usable(slots), len(slots)


def _shorten(tree: Any, req: Any, usable: int) -> None:
    """Let `req` load the first `usable` tokens of those that host memory has for it."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    req.best_match_node, req.host_hit_length = req.last_node, 0
    if not usable:
        return
    end = req.prefix_len + usable + tree.tree_core.is_eagle  # EAGLE's keys are pairs of tokens
    tokens = req.full_untruncated_fill_ids[:end]
    key = RadixKey(tokens, extra_key=req.extra_key, cache_salt=req.cache_salt)
    found = tree.match_prefix(MatchPrefixParams(key=key))
    req.best_match_node, req.host_hit_length = found.best_match_node, found.host_hit_length


HOOKS = (
    HookSpec(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache",
        _after_init,
        HookType.AFTER,
        LOADED,
    ),
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
    *copy_hooks(
        CopyStreams(
            to_host=lambda controller: controller.l2_transfer_engine.device_to_host_stream,
            to_device=lambda controller: controller.l2_transfer_engine.host_to_device_stream,
        ),
        loads=(f"{HYBRID_CONTROLLER}.load",),
        pool="sglang.srt.mem_cache.pool_host.base.HostKVCache",
    ),
)
