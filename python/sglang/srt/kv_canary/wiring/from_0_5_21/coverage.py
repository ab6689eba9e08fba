"""What is said of paths on all of these releases."""

from __future__ import annotations

from ...pool_patcher.registry import Coverage
from ..path_support import PathSupport

__all__ = ["BEAM_SEARCH"]

BEAM_SEARCH = PathSupport(
    "beam search",
    Coverage.REFUSED,
    "requests with beam_width are answered with an error: a beam's rows belong to no request",
)
