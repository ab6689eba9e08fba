"""The paths of SGLang that are covered: those that a test has run on this release. None of them has run on a GPU."""

from __future__ import annotations

from ..from_0_5_17.coverage import served
from ..path_support import PathSupport
from ..v0_5_17.coverage import MORE

SERVED: tuple[PathSupport, ...] = (*served(), *MORE)
