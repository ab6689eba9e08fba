"""Structured events: one JSON object per line in the event file. The log gets text from the reporters."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from copy import copy
from pathlib import Path

from ..errors import CanaryConfigError

logger = logging.getLogger(__name__)

SCHEMA = 2  # of all events; docs/events.md lists the changes
LOG_LOST_EVERY_S = 60.0
LOOK_EVERY_S = 1.0  # how often to check that the path still leads to the open file


class EventSink:
    """Appends events to `path`, and flushes each one so that nothing is lost if the process is killed.

    An empty path drops events. Several processes may append to one file, because a line is one write. An event that
    cannot be written (e.g. the disk is full) is lost, and the loss is logged: it is no reason to stop serving. Raises
    CanaryConfigError for a path that cannot be a regular file.
    """

    def __init__(
        self, path: str, rank: int, pp_rank: int | None = None, dp_rank: int | None = None
    ) -> None:
        self._stamp: dict[str, int | str | None] = {
            "schema": SCHEMA,
            "rank": rank,
            "pp_rank": pp_rank,
            "dp_rank": dp_rank,
        }
        self._file = _EventFile(path) if path else None

    @property
    def is_complete(self) -> bool:
        """Whether there is a file, and every event so far is in it."""
        return self._file is not None and self._file.lost == 0

    def for_runner(self, role: str) -> EventSink:
        """A sink into the same file whose events name their model runner."""
        sink = copy(self)
        sink._stamp = {**self._stamp, "runner": role}
        return sink

    def emit(self, event: dict) -> None:
        """Write `event`, a JSON-ready dict with its kind under "event"."""
        if self._file is not None:
            self._file.append(json.dumps({"time": time.time(), **self._stamp, **event}) + "\n")


class _EventFile:
    """The open file, shared by all sinks of a process. Detects a rotation that moves the file away."""

    def __init__(self, path: str) -> None:
        self._path = path
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._fd = _open(path)
        self._next_look = time.monotonic() + LOOK_EVERY_S
        self._next_log = 0.0
        self._is_torn = False  # the file ends in the middle of a line
        self.lost = 0  # events

    def append(self, line: str) -> None:
        self._reopen_if_moved()
        error = "only a part of the event was written"
        data = ("\n" + line if self._is_torn else line).encode()
        try:
            written = os.write(self._fd, data)
        except OSError as raised:
            written, error = 0, str(raised)
        if written == len(data):
            self._is_torn = False
            return
        self._is_torn |= written > 0
        self.lost += 1
        self._log(
            f"cannot write to its event file: {error}; {self.lost} events lost so far. "
            "The log continues, but shows only some of many violations. Make room for the file, or set "
            "SGLANG_KV_CANARY_EVENT_FILE to another one"
        )

    def _reopen_if_moved(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        try:
            if _is_at(self._path, self._fd):
                return
            fd = _open(self._path)
        except (OSError, CanaryConfigError) as error:
            self._log(
                f"cannot reopen its event file, which was moved: {error}. It keeps writing to the old one"
            )
            return
        os.close(self._fd)
        self._fd, self._is_torn = fd, False

    def _log(self, problem: str) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + LOG_LOST_EVERY_S
            logger.error("kv-canary %s", problem)


def _open(path: str) -> int:
    """A file descriptor for appending. Raises CanaryConfigError; never blocks."""
    # O_NONBLOCK: opening a FIFO that nobody reads would wait for a reader.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise CanaryConfigError(
            f"SGLANG_KV_CANARY_EVENT_FILE={path!r} cannot be opened: {error}. Expected a regular file."
        ) from error
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise CanaryConfigError(
        f"SGLANG_KV_CANARY_EVENT_FILE={path!r} is refused: expected a regular file, got a device, FIFO or socket."
    )


def _is_at(path: str, fd: int) -> bool:
    """Whether `fd` is the file at `path`. Raises OSError if this cannot be determined."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))
