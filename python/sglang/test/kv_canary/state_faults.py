"""Faults of states of linear-attention layers, in a server's own code, at a prompt that contains the fault's token."""

from __future__ import annotations

from typing import Any

DAMAGE = 500  # bytes of every cached state change
ZERO_SNAPSHOT = 501  # the prompt's state is not copied, so that the cache gets zeros

__all__ = ["DAMAGE", "ZERO_SNAPSHOT", "break_states"]


def break_states() -> None:
    """A plugin of SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    start = "sglang.srt.managers.scheduler.Scheduler.init_cache_with_memory_pool"
    HookRegistry.register(start, _break, HookType.AFTER)


def _break(_: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    tree = scheduler.tree_cache
    pool = tree.req_to_token_pool.mamba_pool
    match, cache, copy = tree.match_prefix, tree.cache_unfinished_req, pool.copy_from
    is_lost = [False]

    def damaged_match(params: Any) -> Any:
        held = tree.all_mamba_values_flatten().long()
        if params.cow_mamba and DAMAGE in params.key.token_ids and len(held):
            pool.mamba_cache.conv[0][:, held] += 1
        return match(params)

    def cache_zeros(request: Any, *args: Any, **kwargs: Any) -> None:
        is_lost[0] = ZERO_SNAPSHOT in request.fill_ids
        cache(request, *args, **kwargs)
        is_lost[0] = False

    def lost_copy(source: Any, target: Any) -> None:
        if not is_lost[0]:
            copy(source, target)

    tree.match_prefix, tree.cache_unfinished_req, pool.copy_from = (
        damaged_match,
        cache_zeros,
        lost_copy,
    )
