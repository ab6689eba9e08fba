"""HiCache: what of it these releases refuse."""

from __future__ import annotations

from sglang.srt.environ import envs

from ..hicache_refusals import HICACHE_REFUSALS
from ..refusals import Refusal

__all__ = ["REFUSALS"]

REFUSALS: tuple[Refusal, ...] = (
    *HICACHE_REFUSALS,
    Refusal(
        "HiCache with frozen-KV MTP",
        lambda args: (
            bool(args.enable_hierarchical_cache) and args.speculative_algorithm == "FROZEN_KV_MTP"
        ),
        "its target, Gemma 4, has sliding windows, whose pages are followed from SGLang 0.5.22 on. Up to 0.5.17 SGLang "
        "itself ends.",
        "Remove --enable-hierarchical-cache.",
    ),
    Refusal(
        "HiCache with the unified or C++ radix tree",
        lambda args: (
            bool(args.enable_hierarchical_cache)
            and (
                envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE.get()
                or envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get()
            )
        ),
        "their copies between device and host are not followed.",
        "Unset SGLANG_ENABLE_UNIFIED_RADIX_TREE and SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.",
    ),
)
