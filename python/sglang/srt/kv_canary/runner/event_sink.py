"""Structured events: one JSON object a line in the event file; the log gets text from the reporters."""

from __future__ import annotations

import json
import os
import time
from copy import copy
from pathlib import Path


class EventSink:
    """Appends events to `path` and flushes each one, so that nothing is lost when the process is killed.

    An empty path drops events. Several processes may append to one file: a line is one write.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._stamp: dict[str, int | str] = {"rank": rank}
        self._fd: int | None = None
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def for_runner(self, role: str) -> EventSink:
        """A sink into the same file whose events say which model runner they are of."""
        sink = copy(self)
        sink._stamp = {**self._stamp, "runner": role}
        return sink

    def emit(self, event: dict) -> None:
        """`event`: JSON-ready, with its kind under "event"."""
        if self._fd is None:
            return
        stamped = {"time": time.time(), **self._stamp, **event}
        os.write(self._fd, (json.dumps(stamped) + "\n").encode())
