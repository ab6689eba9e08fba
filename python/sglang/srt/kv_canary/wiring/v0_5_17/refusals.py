"""Setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from ..from_0_5_17.refusals import SHARED
from ..refusals import DISAGGREGATION, Refusal
from ..until_0_5_17 import hicache_refusals

__all__ = ["REFUSALS"]

REFUSALS: tuple[Refusal, ...] = (*SHARED, DISAGGREGATION, *hicache_refusals.REFUSALS)
