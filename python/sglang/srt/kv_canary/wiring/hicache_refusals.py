"""HiCache: what all releases refuse of it. Prefix cache and host pool are checked when they exist, see `hicache`."""

from __future__ import annotations

from typing import Any

from ..host_tier.host_content import LAYOUTS
from .refusals import Refusal

__all__ = ["COVERED_STORAGE", "HICACHE_REFUSALS"]

COVERED_STORAGE = (None, "file")


def _on(args: Any) -> bool:
    return bool(args.enable_hierarchical_cache)


HICACHE_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "HiCache with this storage backend",
        lambda args: _on(args) and args.hicache_storage_backend not in COVERED_STORAGE,
        "KV that it loads arrives without records: most backends copy pages past the code that could take them along.",
        "Set --hicache-storage-backend to file, or remove it.",
    ),
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
