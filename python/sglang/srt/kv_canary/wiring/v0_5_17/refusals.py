"""Setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from ..from_0_5_17.refusals import SHARED
from ..from_0_5_17.until_0_5_21 import UNTIL_0_5_21
from ..refusals import Refusal
from ..until_0_5_17 import hicache_refusals

__all__ = ["REFUSALS"]

REFUSALS: tuple[Refusal, ...] = (
    *SHARED,
    *UNTIL_0_5_21,
    *hicache_refusals.REFUSALS,
)
