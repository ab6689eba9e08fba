"""How a family of releases follows the states of linear-attention layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runner.manager import CanaryManager


@dataclass(frozen=True, slots=True)
class StateAnswers:
    """Answers for the state pool of the target's model runner."""

    # What cannot be followed in a server with these ServerArgs; "" if nothing.
    why_unchecked: Callable[[Any], str]
    # Follow the pool, which is unused. Returns what is checked, JSON-ready. Raises UnsupportedPoolError.
    watch: Callable[[CanaryManager, Any], dict[str, Any]]
