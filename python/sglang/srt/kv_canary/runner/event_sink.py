"""Structured events: one JSON object a line in the event file; the log gets text from the reporters."""

from __future__ import annotations

import json
import logging
import os
import time
from copy import copy
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

LOG_LOST_EVERY_S = 60.0


@dataclass(slots=True)
class _Losses:
    """What could not be written; shared by all sinks into one file."""

    events: int = 0
    torn: bool = False  # the file ends in the middle of a line
    next_log: float = 0.0


class EventSink:
    """Appends events to `path` and flushes each one, so that nothing is lost when the process is killed.

    An empty path drops events. Several processes may append to one file: a line is one write. An event that cannot be
    written (the disk is full) is lost, and logged as that: it is no reason to stop serving.
    """

    def __init__(
        self, path: str, rank: int, pp_rank: int | None = None, dp_rank: int | None = None
    ) -> None:
        self._stamp: dict[str, int | str | None] = {
            "rank": rank,
            "pp_rank": pp_rank,
            "dp_rank": dp_rank,
        }
        self._losses = _Losses()
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
        line = json.dumps({"time": time.time(), **self._stamp, **event}) + "\n"
        self._write(self._fd, ("\n" + line if self._losses.torn else line).encode())

    def _write(self, fd: int, line: bytes) -> None:
        losses, error = self._losses, "the file took only a part of it"
        try:
            written = os.write(fd, line)
        except OSError as raised:
            written, error = 0, str(raised)
        if written == len(line):
            losses.torn = False
            return
        losses.torn |= written > 0
        losses.events += 1
        if time.monotonic() >= losses.next_log:
            losses.next_log = time.monotonic() + LOG_LOST_EVERY_S
            logger.error(
                "kv-canary cannot write to its event file: %s; %d events lost so far. "
                "The log goes on, which shows a part of many violations; make room for the file, or set "
                "SGLANG_KV_CANARY_EVENT_FILE to another one",
                error,
                losses.events,
            )
