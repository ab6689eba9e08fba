"""The prefix cache."""

from __future__ import annotations

from typing import Any

from ..hook_spec import HookSpec, HookType
from ..prefix_caches import attach_prefix_cache


def _attach_radix_cache(_: Any, scheduler: Any, *a: Any, **k: Any) -> None:
    attach_prefix_cache(scheduler.tree_cache)


HOOKS = (
    HookSpec(
        "sglang.srt.managers.scheduler.Scheduler.init_cache_with_memory_pool",
        _attach_radix_cache,
        HookType.AFTER,
        "cached prefixes that nobody reads",
    ),
)
