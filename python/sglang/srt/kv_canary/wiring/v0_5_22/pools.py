"""Pools of these releases alone: sub-pools of one buffer, in which pages move."""

from __future__ import annotations

from ...pool_patcher.registry import PoolSupport
from ..from_0_5_17.pools import (
    DRAFTS,
    UNIFIED_HYBRID,
    UNIFIED_MHA,
    UNIFIED_MLA,
    UNIFIED_SWA,
    judged,
)

__all__ = ["UNIFIED_POOLS"]

_SERVED = "; judged by pool objects; served on CPU and an H100 with 0.5.23"
UNIFIED_POOLS = {
    UNIFIED_MLA: judged(UNIFIED_MLA),
    **{name: judged(name, served=_SERVED) for name in (UNIFIED_MHA, UNIFIED_HYBRID, UNIFIED_SWA)},
    **{
        name: PoolSupport(
            refused="its rows lie in the pages of the target, which no draft's records follow"
        )
        for name in DRAFTS
    },
}
