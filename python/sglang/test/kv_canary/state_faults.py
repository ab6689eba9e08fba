"""Faults of states of linear-attention layers, in a server's own code, at a prompt that contains the fault's token."""

from __future__ import annotations

from typing import Any

from sglang_kv_canary.wiring.releases import release

DAMAGE = 500  # bytes of every cached state change
LOST_COPY = 501  # the prompt's state is not copied for the cache

__all__ = ["DAMAGE", "LOST_COPY", "break_states"]


_is_lost = [False]


def break_states() -> None:
    """A plugin of SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Below what the canary wraps
    copy = "sglang.srt.mem_cache.memory_pool.MambaPool.copy_from"
    HookRegistry.register(copy, _copy_unless_lost, HookType.AROUND)
    if release().has_own_canary:
        tree = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.__init__"
        HookRegistry.register(tree, lambda _, tree, *__, **___: _break(tree), HookType.AFTER)
        return
    start = "sglang.srt.managers.scheduler.Scheduler.init_cache_with_memory_pool"
    HookRegistry.register(start, lambda _, s, *__, **___: _break(s.tree_cache), HookType.AFTER)


def _copy_unless_lost(copy: Any, *args: Any) -> None:
    if not _is_lost[0]:
        copy(*args)


def _break(tree: Any) -> None:
    pool = tree.req_to_token_pool.mamba_pool
    inserts = "checkpoint" if release().has_own_canary else "cache_unfinished_req"
    match, cache = tree.match_prefix, getattr(tree, inserts)

    def damaged_match(params: Any) -> Any:
        held = tree.all_mamba_values_flatten().long()
        if params.cow_mamba and DAMAGE in params.key.token_ids and len(held):
            pool.mamba_cache.conv[0][:, held] += 1
        return match(params)

    def cache_without_copy(request: Any, *args: Any, **kwargs: Any) -> None:
        _is_lost[0] = LOST_COPY in release().tokens_of(request)[0]
        cache(request, *args, **kwargs)
        _is_lost[0] = False

    tree.match_prefix = damaged_match
    setattr(tree, inserts, cache_without_copy)
