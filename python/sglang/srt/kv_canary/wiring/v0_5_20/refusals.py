"""Setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from ..from_0_5_21.refusals import EXTERNAL_LINKER
from ..refusals import Refusal
from ..v0_5_19.refusals import REFUSALS as OF_0_5_19

__all__ = ["REFUSALS"]

REFUSALS: tuple[Refusal, ...] = (*OF_0_5_19, EXTERNAL_LINKER)
