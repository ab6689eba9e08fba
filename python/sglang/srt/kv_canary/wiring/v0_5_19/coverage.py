"""The paths of SGLang that are covered: those that a test has run on this release. None of them has run on a GPU."""

from __future__ import annotations

from ...pool_patcher.registry import Coverage
from ..from_0_5_17.coverage import served
from ..path_support import PathSupport
from ..v0_5_17.coverage import MORE

_HICACHE = "HiCache: host memory, and the storage backend file"

SERVED: tuple[PathSupport, ...] = (
    *(path for path in served() if path.name != _HICACHE),
    *MORE,
    PathSupport(_HICACHE, Coverage.REFUSED, "followed up to 0.5.18, and from 0.5.22 on"),
    PathSupport(
        "beam search",
        Coverage.REFUSED,
        "requests with beam_width are answered with an error: a beam's rows belong to no request",
    ),
)
