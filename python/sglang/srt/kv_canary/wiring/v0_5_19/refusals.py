"""Setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from ..from_0_5_17.until_0_5_21 import MIXED_CHUNKS
from ..from_0_5_21.refusals import MINICPM, PAGE_MAJOR_LAYOUT
from ..hicache_refusals import HICACHE_REFUSALS
from ..refusals import Refusal
from ..until_0_5_17 import hicache_refusals
from ..v0_5_17.refusals import REFUSALS as OF_0_5_17

__all__ = ["REFUSALS"]

_OF_HICACHE = {*HICACHE_REFUSALS, *hicache_refusals.REFUSALS}

REFUSALS: tuple[Refusal, ...] = (
    *(case for case in OF_0_5_17 if case not in _OF_HICACHE),
    PAGE_MAJOR_LAYOUT,
    MINICPM,
    Refusal(
        "HiCache",
        lambda args: bool(args.enable_hierarchical_cache),
        "its reads from storage are counted in another way than on 0.5.18 and 0.5.22, whose ways are followed.",
        "Remove --enable-hierarchical-cache, or use another release.",
    ),
    MIXED_CHUNKS,
)
