"""The paths of SGLang that are covered: those that a test has run on this release."""

from __future__ import annotations

from ...pool_patcher.registry import Coverage
from ..from_0_5_17.coverage import (
    NO_GPU,
    SESSION_RADIX_CACHE,
    served,
)
from ..from_0_5_21.coverage import BEAM_SEARCH
from ..path_support import PathSupport

_READ = ("torch.compile of the model", "two-batch overlap, single-batch overlap")

SERVED: tuple[PathSupport, ...] = (
    *served(without=_READ),
    *(PathSupport(name, Coverage.PARTLY, "read, never run on this release") for name in _READ),
    PathSupport(
        "speculative: in step with other ranks",
        Coverage.PARTLY,
        f"EAGLE and EAGLE3 with data-parallel attention; {NO_GPU}",
    ),
    SESSION_RADIX_CACHE,
    PathSupport(
        "prefill context parallelism",
        Coverage.PARTLY,
        "each rank stores, and checks, all tokens; MHA on CPU; DSA and MLA read",
    ),
    PathSupport(
        "sweep of cached prefixes",
        Coverage.PARTLY,
        "the unified tree in one chunk a pass; the first slot of a prefix without its chain",
    ),
    BEAM_SEARCH,
)
