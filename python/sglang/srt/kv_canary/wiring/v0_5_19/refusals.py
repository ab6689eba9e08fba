"""Setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from sglang.srt.environ import envs

from ..from_0_5_17.until_0_5_21 import MIXED_CHUNKS
from ..from_0_5_21.refusals import MINICPM, PAGE_MAJOR_LAYOUT
from ..hicache_refusals import AS_A_BUFFER, HICACHE_REFUSALS, IN_HOST_MEMORY, NO_WINDOWS
from ..refusals import Refusal
from ..until_0_5_17 import hicache_refusals
from ..v0_5_17.refusals import REFUSALS as OF_0_5_17

__all__ = ["REFUSALS"]

_OF_HICACHE = {*HICACHE_REFUSALS, *hicache_refusals.REFUSALS}

REFUSALS: tuple[Refusal, ...] = (
    *(case for case in OF_0_5_17 if case not in _OF_HICACHE),
    PAGE_MAJOR_LAYOUT,
    MINICPM,
    *IN_HOST_MEMORY,
    AS_A_BUFFER,
    NO_WINDOWS,
    Refusal(
        "HiCache with a storage backend",
        lambda args: (
            bool(args.enable_hierarchical_cache) and args.hicache_storage_backend is not None
        ),
        "its reads from storage are counted in another way than on 0.5.18 and 0.5.21, whose ways are followed.",
        "Remove --hicache-storage-backend, or use another release.",
    ),
    Refusal(
        "HiCache with the C++ radix tree",
        lambda args: (
            bool(args.enable_hierarchical_cache) and envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get()
        ),
        "its copies between device and host are not followed.",
        "Unset SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.",
    ),
    MIXED_CHUNKS,
)
