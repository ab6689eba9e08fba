"""A server that fills, moves and deletes its event files while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from sglang_kv_canary.reports.event_loader import Event, Problem
from sglang_kv_canary.reports.event_sink import EventSink
from sglang_kv_canary.reports.rank_file import EventFolder

LIVE = "events.tp0.jsonl"
FILE_BYTES = 4096


class RotatingServer:
    """Keeps `files` files. It writes `before` events, and `during` more once reading begins, or has read LIVE."""

    def __init__(self, folder: Path, files: int, before: int, during: int, at_end: bool) -> None:
        kept = EventFolder(str(folder), FILE_BYTES, files)
        self._sink = EventSink("", 0, folder=kept).for_runner("target")
        self._during, self._at_end = during, at_end
        self.events = 0
        self._write(before)

    def watch(self, found: Iterable[Event | Problem], file: Path) -> Iterator[Event | Problem]:
        """See `Watch`."""
        if not self._at_end:
            self._go_on()
        yield from found
        if self._at_end and file.name == LIVE:
            self._go_on()

    def _go_on(self) -> None:
        self._write(self._during)
        self._during = 0

    def _write(self, events: int) -> None:
        for _ in range(events):
            self.events += 1
            swept = {"number": self.events, "slots": 1, "seconds": 0.5}
            self._sink.emit({"event": "host_sweep", **swept})
