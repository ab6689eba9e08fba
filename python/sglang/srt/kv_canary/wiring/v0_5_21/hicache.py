"""Hooks on HiCache, whose prefix cache is the unified tree.

SGLang plans a request with its whole cached prefix, and then loads all of it or nothing. So the canary shortens the
prefix while the request is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..context import context
from ..guard import attempt
from ..hicache import LOADED, agreed
from ..hook_spec import HookSpec, HookType
from ..v0_5_17.hicache import TREE, match_usable, slots_to_load, start_tree
from ..v0_5_18.hicache import key_of
from ..v0_5_19.hicache import COPIES

__all__ = ["ADMISSION", "HOOKS"]


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
    slots = attempt(slots_to_load, tree, req.best_match_node)
    usable = agreed(tree, None if slots is None else attempt(tier.usable, slots))
    if slots is not None and usable == len(slots):
        return admission
    attempt(_shorten, tree, req, usable - usable % tree.page_size)
    return original(adder, req, host_hit_length=req.host_hit_length, **more)


def _shorten(tree: Any, req: Any, usable: int) -> None:
    """Let `req` load the first `usable` tokens of those that host memory has for it."""
    req.best_match_node, req.host_hit_length = req.last_node, 0
    if usable:
        req.best_match_node, req.host_hit_length = match_usable(tree, key_of, req, usable)


ADMISSION = HookSpec(
    "sglang.srt.managers.schedule_policy.PrefillAdder._select_prefill_admission",
    _around_admission,
    HookType.AROUND,
    LOADED,
)
HOOKS = (
    HookSpec(f"{TREE}.init_hicache", start_tree, HookType.AFTER, LOADED),
    ADMISSION,
    *COPIES,
)
