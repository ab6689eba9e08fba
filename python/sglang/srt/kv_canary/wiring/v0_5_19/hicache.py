"""Hooks on HiCache, whose prefix cache is the unified tree for all models. Storage is refused."""

from __future__ import annotations

from ..hicache import HYBRID_CONTROLLER, CopyStreams, copy_hooks
from ..hook_spec import HookSpec
from ..until_0_5_17.hicache import refusing_hooks
from ..v0_5_17.hicache import unified_hooks
from ..v0_5_18.hicache import key_of

__all__ = ["COPIES", "HOOKS", "OTHER_TREE"]

OTHER_TREE = "hiradix_cache.HiRadixCache.__init__"  # nothing makes one

COPIES: tuple[HookSpec, ...] = copy_hooks(
    CopyStreams(
        to_host=lambda controller: controller.l2_transfer_engine.device_to_host_stream,
        to_device=lambda controller: controller.l2_transfer_engine.host_to_device_stream,
    ),
    loads=(f"{HYBRID_CONTROLLER}.load",),
    pool="sglang.srt.mem_cache.pool_host.base.HostKVCache",
)

HOOKS = (
    *refusing_hooks(OTHER_TREE),
    *unified_hooks(key_of),
    *COPIES,
)
