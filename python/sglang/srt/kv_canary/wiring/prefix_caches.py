"""Which prefix caches are followed: those that SGLang itself builds. Each has been read for each release."""

from __future__ import annotations

from typing import Any

from ..errors import startup_error
from ..pool_patcher.registry import qualified_name
from .context import context

__all__ = ["attach_prefix_cache"]

_OWN = ("sglang.srt.mem_cache.", "sglang.srt.session.")


def attach_prefix_cache(tree_cache: Any) -> None:
    """Tell all managers of the scheduler's prefix cache. Raises CanaryStartupError for one that is not followed."""
    if context.managers:
        _refuse_unless_followed(tree_cache)
    for manager in context.managers:
        manager.attach_radix_cache(tree_cache)


def _refuse_unless_followed(tree_cache: Any) -> None:
    name = qualified_name(type(tree_cache))
    if not name.startswith(_OWN):
        raise startup_error(
            f"the prefix cache {name} is of another package, and may fill or share slots in ways of its own.",
            "slots that it loads, moves or frees",
        )
    if getattr(tree_cache.req_to_token_pool, "_aux_cache", None) is not None:
        raise startup_error(
            "the attention of this model keeps compressed keys in slots of the pool that no page table lists.",
            "keys that choose what attention reads",
        )
    inner = getattr(tree_cache, "inner", None)  # of streaming sessions
    if inner is not None:
        _refuse_unless_followed(inner)
