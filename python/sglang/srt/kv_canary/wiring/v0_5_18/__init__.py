"""SGLang 0.5.18, which has most of 0.5.17. A cache salt is no longer a part of a request's extra key."""

from __future__ import annotations

from dataclasses import replace

from ..from_0_5_17.pools import POOLS, UNIFIED_HYBRID, UNIFIED_MHA
from ..from_0_5_21.answers import namespace_of, namespace_of_key
from ..releases import found_later
from ..v0_5_17 import RELEASE as OF_0_5_17
from .allocator_methods import ALLOCATOR_METHODS, SWA_ALLOCATOR_METHODS

__all__ = ["RELEASE"]

# Module of 0.5.17 -> the one in its place.
_OTHER_HOOKS = {
    "v0_5_17.allocator": "v0_5_18.allocator",
    "v0_5_17.hicache": "v0_5_18.hicache",
}


RELEASE = replace(
    OF_0_5_17,
    hook_modules=tuple(_OTHER_HOOKS.get(module, module) for module in OF_0_5_17.hook_modules),
    served=found_later(__name__, "coverage", "SERVED"),
    # New, and refused as the others with virtual slot ids.
    known_pools=lambda: {**OF_0_5_17.known_pools(), UNIFIED_HYBRID: POOLS[UNIFIED_MHA]},
    namespace_of=namespace_of,
    namespace_of_key=namespace_of_key,
    allocator_methods=ALLOCATOR_METHODS,
    swa_allocator_methods=ALLOCATOR_METHODS | SWA_ALLOCATOR_METHODS,
)
