"""SGLang 0.5.19, between 0.5.18 and 0.5.22. Of the latter it has arguments, rows and free groups."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

from ..from_0_5_17.answers import server_args
from ..from_0_5_17.pools import PAGE_MAJOR
from ..path_support import PathSupport
from ..refusals import Refusal
from ..v0_5_18 import RELEASE as OF_0_5_18
from ..v0_5_22.pools import NOT_BUILT
from .allocator_methods import ALLOCATOR_METHODS, SWA_ALLOCATOR_METHODS

__all__ = ["RELEASE"]

# Module of 0.5.18 -> those in its place.
_OTHER_HOOKS = {
    "v0_5_18.allocator": ("v0_5_19.allocator", "v0_5_22.beam_search"),
    "v0_5_18.hicache": ("v0_5_19.hicache",),
    "until_0_5_17.hicache_storage": (),
    "from_0_5_17.hicache_eviction": (),
    "until_0_5_17.rows": ("v0_5_19.rows",),
}


def _served() -> tuple[PathSupport, ...]:
    from .coverage import SERVED

    return SERVED


def _refusals() -> tuple[Refusal, ...]:
    from .refusals import REFUSALS

    return REFUSALS


def _queues_frees(allocator: Any) -> bool:
    # Freed pages are seen in `_release_page_ids`, whichever call frees them.
    return allocator.free_group is not None or hasattr(allocator, "_release_page_ids")


def _settled(server_args: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return resolving_view(server_args)


def _pads_to_other_ranks(_: Any) -> bool:
    from sglang.srt.utils.common import require_mlp_sync

    return require_mlp_sync()


RELEASE = replace(
    OF_0_5_18,
    hook_modules=tuple(
        other for module in OF_0_5_18.hook_modules for other in _OTHER_HOOKS.get(module, (module,))
    ),
    served=_served,
    known_pools=lambda: {**OF_0_5_18.known_pools(), PAGE_MAJOR: NOT_BUILT},
    refusals=_refusals,
    row_of=attrgetter("kv.req_pool_idx"),  # in C: a step asks for those of the whole batch
    allocator_methods=ALLOCATOR_METHODS,
    swa_allocator_methods=ALLOCATOR_METHODS | SWA_ALLOCATOR_METHODS,
    queues_frees=_queues_frees,
    settled=_settled,
    server_args=lambda: _settled(server_args()),
    pads_to_other_ranks=_pads_to_other_ranks,
)
