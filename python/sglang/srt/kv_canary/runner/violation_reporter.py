"""What becomes of a violation: a log entry and an event, or the end of the server."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from sglang.srt.kv_canary.config import CanaryMode
from sglang.srt.kv_canary.errors import CanaryViolationError
from sglang.srt.kv_canary.runner.event_sink import EventSink
from sglang.srt.kv_canary.runner.violation import Violation, render

logger = logging.getLogger(__name__)

MAX_KNOWN = 4096  # distinct violations remembered for telling repeats
LAST_WORDS_ENV = "_KV_CANARY_LAST_WORDS_FILE"  # set by the main process for its children


class ViolationReporter:
    """Reports each distinct violation once; repeats are counted."""

    def __init__(self, mode: CanaryMode, sink: EventSink, log_every_s: float) -> None:
        self._mode = mode
        self._sink = sink
        self._log_every_s = log_every_s
        self._known: dict[tuple, int] = {}
        self._next_log = 0.0
        self._unlogged = 0
        self.distinct = 0
        self.repeats = 0

    def log_or_raise_violation(self, violations: list[Violation]) -> None:
        """Log the new ones among `violations`; in RAISE mode then raise CanaryViolationError."""
        fresh = [v for v in violations if self._is_new(v)]
        if not fresh:
            return
        for violation in fresh:
            self._sink.emit(violation.as_event())
        if self._mode is CanaryMode.RAISE:
            text = "\n".join(render(v) for v in fresh[:4])
            if len(fresh) > 4:
                text += f"\nkv-canary: and {len(fresh) - 4} more violations in the same step"
            leave_last_words(text)
            raise CanaryViolationError(text)
        self._log(fresh)

    def _is_new(self, violation: Violation) -> bool:
        if violation.key in self._known:
            self._known[violation.key] += 1
            self.repeats += 1
            return False
        if len(self._known) >= MAX_KNOWN:
            self._known.pop(next(iter(self._known)))
        self._known[violation.key] = 1
        self.distinct += 1
        return True

    def _log(self, fresh: list[Violation]) -> None:
        now = time.monotonic()
        if now < self._next_log:
            self._unlogged += len(fresh)
            return
        self._next_log = now + self._log_every_s
        more = len(fresh) - 1 + self._unlogged
        tail = (
            f"\n  and {more} more since the last entry (all are in the event file)" if more else ""
        )
        logger.error("%s%s", render(fresh[0]), tail)
        self._unlogged = 0


def leave_last_words(text: str) -> None:
    """Where the main process looks before it kills the process tree."""
    path = os.environ.get(LAST_WORDS_ENV)
    if path:
        # Without them the main process has less to say; the error that follows is the same.
        with suppress(OSError), Path(path).open("a") as file:
            file.write(text + "\n")
