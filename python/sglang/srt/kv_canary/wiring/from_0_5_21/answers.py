"""What requests, allocators and arguments of these releases tell."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from ...pool_patcher.registry import PoolSupport
from ..adapters import shared_key, shared_prefix_key
from ..from_0_5_17 import answers

__all__ = [
    "NOT_BUILT",
    "namespace_of",
    "namespace_of_key",
    "pads_to_other_ranks",
    "queues_frees",
    "row_of",
    "salted",
    "server_args",
    "settled",
]

NOT_BUILT = PoolSupport(
    refused="SGLang itself cannot build it on this release: its strided views are gone"
)

# A request's row of req_to_token, read in C: a step asks for those of the whole batch.
row_of = attrgetter("kv.req_pool_idx")


def salted(extra_key: str | None, cache_salt: str | None) -> str | None:
    """As the anchor of a chain takes it. None: the default namespace."""
    return extra_key if cache_salt is None else f"{extra_key or ''}\n{cache_salt}"


def namespace_of(request: Any) -> str | None:
    """LoRA, extra key and cache salt."""
    return salted(shared_key(request, request.extra_key), request.cache_salt)


def namespace_of_key(key: Any) -> str | None:
    return salted(shared_prefix_key(key.extra_key), key.cache_salt)


def queues_frees(allocator: Any) -> bool:
    """Freed pages are seen in `_release_page_ids`, whichever call frees them."""
    return allocator.free_group is not None or hasattr(allocator, "_release_page_ids")


def settled(args: Any) -> Any:
    """`args` as they are after all defaults are resolved."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return resolving_view(args)


def server_args() -> Any:
    """Those of this process, settled."""
    return settled(answers.server_args())


def pads_to_other_ranks(_: Any) -> bool:
    """Whether all ranks agree on batch sizes."""
    from sglang.srt.utils.common import require_mlp_sync

    return require_mlp_sync()
