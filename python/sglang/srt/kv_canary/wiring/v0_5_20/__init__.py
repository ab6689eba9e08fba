"""SGLang 0.5.20, which has most of 0.5.21. Its ranks are found as on 0.5.19, and it updates weights as 0.5.17 does."""

from __future__ import annotations

from dataclasses import replace

from ..releases import found_later
from ..v0_5_19 import RELEASE as OF_0_5_19
from ..v0_5_21 import RELEASE as OF_0_5_21

__all__ = ["RELEASE"]

# Module of 0.5.21 -> those in its place.
_OTHER_HOOKS = {
    "from_0_5_21.weights": ("v0_5_17.weights",),
    "v0_5_21.hicache": ("v0_5_20.hicache",),
    "v0_5_22.hicache_storage": (),
    "from_0_5_17.hicache_eviction": (),
}


RELEASE = replace(
    OF_0_5_21,
    hook_modules=tuple(
        other for module in OF_0_5_21.hook_modules for other in _OTHER_HOOKS.get(module, (module,))
    ),
    served=found_later(__name__, "coverage", "SERVED"),
    refusals=found_later(__name__, "refusals", "REFUSALS"),
    ranks_of=OF_0_5_19.ranks_of,
    schedulers_here=OF_0_5_19.schedulers_here,
)
