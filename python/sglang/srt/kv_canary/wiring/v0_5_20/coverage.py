"""The paths of SGLang that are covered: those that a test has run on this release. None of them has run on a GPU."""

from __future__ import annotations

from ..from_0_5_17.coverage import HICACHE
from ..path_support import PathSupport
from ..v0_5_19.coverage import SERVED as OF_0_5_19
from ..v0_5_21.coverage import SERVED as OF_0_5_21

_AS_ON_0_5_19 = {
    HICACHE,
    "sweep of cached prefixes",
    "torch.compile of the model",
    "two-batch overlap, single-batch overlap",
}

SERVED: tuple[PathSupport, ...] = (
    *(path for path in OF_0_5_21 if path.name not in _AS_ON_0_5_19),
    *(path for path in OF_0_5_19 if path.name in _AS_ON_0_5_19),
)
