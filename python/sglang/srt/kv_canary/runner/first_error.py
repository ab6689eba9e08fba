"""Runs several independent things although one of them raises."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class FirstError:
    """Keeps the first error of what it runs and logs the others, so that none is lost."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `function` returns; None when it raises."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if self._error is None:
                self._error = error
            elif error is not self._error:
                logger.error("kv-canary: besides the error raised: %s", error, exc_info=error)
            return None

    def raise_first(self) -> None:
        """Raises the first error, if there was one."""
        if self._error is not None:
            raise self._error
