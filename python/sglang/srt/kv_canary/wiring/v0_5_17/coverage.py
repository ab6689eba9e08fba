"""The paths of SGLang that are covered: those that a test has run on this release."""

from __future__ import annotations

from ..from_0_5_17.coverage import served
from ..path_support import PathSupport

SERVED: tuple[PathSupport, ...] = served()
