"""Hooks on HiCache. An engine of its own copies, and all prefix caches but one are the unified tree."""

from __future__ import annotations

from typing import Any

from ..hicache import CopyStreams
from ..until_0_5_17.hicache import tree_hooks
from ..v0_5_17.hicache import unified_hooks

__all__ = ["HOOKS", "key_of"]


def key_of(request: Any, tokens: Any) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(tokens, extra_key=request.extra_key, cache_salt=request.cache_salt)


HOOKS = (
    *tree_hooks(
        CopyStreams(
            to_host=lambda controller: controller.l2_transfer_engine.device_to_host_stream,
            to_device=lambda controller: controller.l2_transfer_engine.host_to_device_stream,
        ),
        (),
    ),
    *unified_hooks(key_of),
)
