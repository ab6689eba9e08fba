"""What a release of SGLang calls the things that a containment needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Terms"]


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one family of releases."""

    length_of: Callable[[Any], int]  # slots in a request's row
    # Of a scheduler: requests of its batches, in flight or not, and the one whose prompt is prefilled in chunks. May
    # have a request twice, or None.
    requests_of: Callable[[Any], Iterable[Any]]
    # (scheduler, request, finish reason): tell the client that a request ends, which waits with no slots
    answer_waiting: Callable[[Any, Any, dict[str, Any]], None]
