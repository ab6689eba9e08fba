"""What a refusal is. Each family of releases has its own list, in its `refusals`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Refusal"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A way to run SGLang that the canary cannot protect, detectable from `ServerArgs` alone."""

    name: str
    predicate: Callable[[Any], bool]
    why: str  # what would not be protected
    how_to_go_on: str
