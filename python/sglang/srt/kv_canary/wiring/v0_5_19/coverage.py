"""The paths of SGLang that are covered: those that a test has run on this release. None of them has run on a GPU."""

from __future__ import annotations

from ...pool_patcher.registry import Coverage
from ..from_0_5_17.coverage import HICACHE, served
from ..from_0_5_21.coverage import BEAM_SEARCH
from ..path_support import PathSupport
from ..v0_5_17.coverage import MORE

_SWEEP = "sweep of cached prefixes"

SERVED: tuple[PathSupport, ...] = (
    *served(without={HICACHE}),
    *(path for path in MORE if path.name != _SWEEP),
    PathSupport(
        HICACHE,
        Coverage.PARTLY,
        "host memory alone, MHA, MLA and DSA pools; a page without records, or damaged, is not used; what is loaded "
        "into a draft pool is not checked",
    ),
    PathSupport(
        _SWEEP,
        Coverage.PARTLY,
        "the unified tree of all models, in one chunk a pass, which waits for the GPU; the first slot of a prefix "
        "without its chain",
    ),
    BEAM_SEARCH,
)
