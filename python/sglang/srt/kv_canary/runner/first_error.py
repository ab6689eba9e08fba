"""Runs several independent functions even if one of them raises."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..reports.internal_errors import InternalErrors

logger = logging.getLogger(__name__)


class FirstError:
    """Hands errors to `errors`. Keeps the first error that must be raised, and logs the others."""

    def __init__(self, errors: InternalErrors) -> None:
        self._errors = errors
        self._error: Exception | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `function`; None if it raises."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.note(function, error)
            return None

    def note(self, function: Callable[..., Any], error: Exception) -> None:
        """`function` has raised `error`."""
        if self._errors.contain(error, function):
            return
        if self._error is None:
            self._error = error
        elif error is not self._error:
            logger.error(
                "kv-canary: another error, besides the one raised: %s", error, exc_info=error
            )

    def raise_first(self) -> None:
        """Raise the first error that must be raised, if any."""
        if self._error is not None:
            raise self._error
