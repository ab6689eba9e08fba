"""The paths of SGLang that are covered: those that a test has run on this release. None of them has run on a GPU."""

from __future__ import annotations

from ..path_support import PathSupport
from ..v0_5_19.coverage import SWEEP
from ..v0_5_21.coverage import SERVED as OF_0_5_21

SERVED: tuple[PathSupport, ...] = (
    *(path for path in OF_0_5_21 if path.name != SWEEP.name),
    SWEEP,
)
