"""Slot spaces and launches by name. Imports nothing but Python: reports are read where no SGLang is."""

from __future__ import annotations

from enum import Enum
from functools import cache

__all__ = ["PoolKind", "Side"]


class Side(str, Enum):
    HEAD = "HEAD"
    TAIL = "TAIL"
    SWEEP = "SWEEP"

    @property
    @cache
    def index(self) -> int:
        return list(Side).index(self)


class PoolKind(str, Enum):
    """Slot spaces of SGLang's pools. The declaration order fixes the launch tag ids."""

    FULL = "FULL"
    SWA = "SWA"
    C4 = "C4"
    C128 = "C128"
    C4_INDEXER = "C4_INDEXER"
    INDEXER = "INDEXER"

    @property
    @cache
    def index(self) -> int:
        return list(PoolKind).index(self)

    @property
    def stride(self) -> int:
        """Tokens that one slot stands for, in SGLang's pools of this kind."""
        return {PoolKind.C4: 4, PoolKind.C128: 128, PoolKind.C4_INDEXER: 4}.get(self, 1)

    @property
    def is_compressed(self) -> bool:
        """Whether one slot stands for several tokens."""
        return self.stride > 1
