"""Errors of the canary's own host code. In mode `log` they never reach SGLang, but are always reported."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..config import CanaryMode
from .event_sink import EventSink
from .safe_text import safe_text

logger = logging.getLogger(__name__)

UNHEALTHY_S = 600.0  # after the last error; longer than any usual scrape interval
LOG_AGAIN_S = 60.0  # between log entries of one place
MAX_FRAMES = 12  # innermost frames of a traceback that are kept
MAX_MESSAGE = 400  # characters of an error's message


class InternalErrors:
    """Counts and reports the internal errors of one manager. Decides whether serving goes on after an error.

    In mode `log` it does, once the server serves. During start-up and in mode `raise`, every error is raised: a server
    that cannot be protected must not start, and a test must fail.
    """

    def __init__(self, mode: CanaryMode, sink: EventSink, role: str = "target") -> None:
        self._contains = mode is CanaryMode.LOG
        self._sink = sink
        self._role = role
        self._next_log: dict[str, float] = {}
        self._last = -UNHEALTHY_S  # time of the last error
        self.serving = False
        self.total = 0
        self.by_where: Counter[str] = Counter()  # name of the function that failed
        self.last = ""  # text of the last one

    @property
    def recent(self) -> bool:
        """Whether there was an error within the last UNHEALTHY_S seconds."""
        return time.monotonic() - self._last < UNHEALTHY_S

    def contain(self, error: Exception, function: Callable[..., Any]) -> bool:
        """Report `error`, raised by `function`. True: serving goes on. False: the caller must raise it."""
        if not (self._contains and self.serving):
            return False
        where = getattr(function, "__qualname__", type(function).__qualname__)
        self.total += 1
        self.by_where[where] += 1
        self._last = time.monotonic()
        self.last = f"{where}: {describe_error(error)}"
        if self._last >= self._next_log.get(where, 0.0):
            self._next_log[where] = self._last + LOG_AGAIN_S
            # The sink itself may have failed; the log entry must be written anyway.
            with suppress(Exception):
                self._emit(where, error)
            self._log(where, error)
        return True

    def _emit(self, where: str, error: Exception) -> None:
        event = {
            "event": "internal_error",
            "where": where,
            "error": describe_error(error),
            "traceback": frames_of(error),
            "total": self.total,
        }
        self._sink.emit(event)

    def _log(self, where: str, error: Exception) -> None:
        logger.error(
            "kv-canary internal error on the %s runner in %s (%d so far): %s. Serving goes on. Please report it\n%s",
            self._role,
            where,
            self.by_where[where],
            describe_error(error),
            "\n".join(f"  {frame}" for frame in frames_of(error)),
        )


def describe_error(error: Exception) -> str:
    """Class and message on one line. Control characters are escaped, because a message may quote a request."""
    message = safe_text(error, MAX_MESSAGE)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def frames_of(error: Exception) -> list[str]:
    """The traceback, innermost frame last, without source lines or values."""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
