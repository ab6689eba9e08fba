"""Tells several listeners the same. One that fails does not keep it from the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


def tell_all(listeners: Iterable[Callable[[T], object]], what: T) -> Exception | None:
    """Call every listener with `what`. Returns the first error, for the caller to raise, and logs the others."""
    first: Exception | None = None
    for listener in listeners:
        try:
            listener(what)
        except Exception as error:
            if first is None:
                first = error
            else:
                logger.error(
                    "kv-canary: another error, besides the one raised: %s", error, exc_info=error
                )
    return first
