"""SGLang 0.5.19, between 0.5.18 and 0.5.22. Of the latter it has arguments, rows and free groups."""

from __future__ import annotations

from dataclasses import replace

from ..from_0_5_17.pools import PAGE_MAJOR
from ..from_0_5_21.answers import (
    NOT_BUILT,
    pads_to_other_ranks,
    queues_frees,
    row_of,
    server_args,
    settled,
)
from ..releases import found_later
from ..v0_5_18 import RELEASE as OF_0_5_18
from .allocator_methods import ALLOCATOR_METHODS, SWA_ALLOCATOR_METHODS

__all__ = ["RELEASE"]

# Module of 0.5.18 -> those in its place.
_OTHER_HOOKS = {
    "v0_5_18.allocator": ("v0_5_19.allocator", "from_0_5_21.beam_search"),
    "v0_5_18.hicache": ("v0_5_19.hicache",),
    "until_0_5_17.hicache_storage": (),
    "from_0_5_17.hicache_eviction": (),
    "until_0_5_17.rows": ("v0_5_21.rows",),
}


RELEASE = replace(
    OF_0_5_18,
    hook_modules=tuple(
        other for module in OF_0_5_18.hook_modules for other in _OTHER_HOOKS.get(module, (module,))
    ),
    served=found_later(__name__, "coverage", "SERVED"),
    known_pools=lambda: {**OF_0_5_18.known_pools(), PAGE_MAJOR: NOT_BUILT},
    refusals=found_later(__name__, "refusals", "REFUSALS"),
    row_of=row_of,
    allocator_methods=ALLOCATOR_METHODS,
    swa_allocator_methods=ALLOCATOR_METHODS | SWA_ALLOCATOR_METHODS,
    queues_frees=queues_frees,
    settled=settled,
    server_args=server_args,
    pads_to_other_ranks=pads_to_other_ranks,
)
