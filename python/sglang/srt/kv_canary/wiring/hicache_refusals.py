"""HiCache: what all releases refuse of it. Prefix cache and host pool are checked when they exist, see `hicache`."""

from __future__ import annotations

from typing import Any

from ..host_tier.host_content import LAYOUTS
from .refusals import Refusal

__all__ = ["AS_A_BUFFER", "COVERED_STORAGE", "HICACHE_REFUSALS", "IN_HOST_MEMORY", "NO_WINDOWS"]

COVERED_STORAGE = (None, "file")


def _on(args: Any) -> bool:
    return bool(args.enable_hierarchical_cache)


AS_A_BUFFER = Refusal(  # from 0.5.19 on
    "HiCache with host memory as a buffer",
    lambda args: _on(args) and args.hicache_host_memory_mode != "cache",
    "its pages come from storage past the code that checks them.",
    "Set --hicache-host-memory-mode to cache.",
)
NO_WINDOWS = Refusal(  # from 0.5.19 to 0.5.21
    "HiCache with frozen-KV MTP",
    lambda args: _on(args) and args.speculative_algorithm == "FROZEN_KV_MTP",
    "its target, Gemma 4, has sliding windows, whose pages are followed from SGLang 0.5.22 on.",
    "Remove --enable-hierarchical-cache.",
)
_STORAGE: tuple[Refusal, ...] = (
    Refusal(
        "HiCache with this storage backend",
        lambda args: _on(args) and args.hicache_storage_backend not in COVERED_STORAGE,
        "KV that it loads arrives without records: most backends copy pages past the code that could take them along.",
        "Set --hicache-storage-backend to file, or remove it.",
    ),
)
IN_HOST_MEMORY: tuple[Refusal, ...] = (
    Refusal(
        "HiCache with this layout of host memory",
        lambda args: _on(args) and args.hicache_mem_layout not in LAYOUTS,
        "the bytes of one token are scattered there, and their fingerprint is another one than on the device.",
        f"Set --hicache-mem-layout to {', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]}.",
    ),
    Refusal(
        "HiCache with pipeline parallelism",
        lambda args: _on(args) and args.pp_size > 1,
        "a damaged page must shorten the prefix on every stage alike, and stages do not agree on that.",
        "Remove --pp-size or --enable-hierarchical-cache.",
    ),
)
HICACHE_REFUSALS = _STORAGE + IN_HOST_MEMORY
