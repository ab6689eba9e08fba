"""Structured events: one JSON object per line in the event files. The log gets text from the reporters."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from copy import copy

from .event_file import EventFile
from .rank_file import EventFolder, RankFile, rank_name
from .snapshot_file import write_snapshot

SCHEMA = 2  # of all events; docs/events.md lists the changes
SETTING = "SGLANG_KV_CANARY_EVENT_FILE"
_REPEATED = "active"  # the kind of event with which each file of a rank begins


class EventSink:
    """Appends events to the file `path` and to the rank's file in `folder`. Without either it drops them.

    Each event is written at once, so that a killed process loses at most one. An event that cannot be written (e.g. the
    disk is full) is lost, and the loss is logged: it is no reason to stop serving. Raises CanaryConfigError for paths
    that cannot be regular files.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        pp_rank: int | None = None,
        dp_rank: int | None = None,
        folder: EventFolder | None = None,
    ) -> None:
        self.dp_rank = dp_rank
        self._stamp: dict[str, int | str | None] = {
            "schema": SCHEMA,
            "rank": rank,
            "pp_rank": pp_rank,
            "dp_rank": dp_rank,
            "run": secrets.token_hex(8),
        }
        self._lines = itertools.count(1)
        self._file = EventFile(path, SETTING) if path else None
        self._rank_name = rank_name(rank, pp_rank, dp_rank)
        self._rank_file = None if folder is None else RankFile(folder, self._rank_name)

    @property
    def is_complete(self) -> bool:
        """Whether there is a file with every event so far."""
        kept = self._rank_file
        in_folder = kept is not None and kept.lost == kept.deleted == 0
        return in_folder or (self._file is not None and self._file.lost == 0)

    def for_runner(self, role: str) -> EventSink:
        """A sink into the same files whose events name their model runner."""
        sink = copy(self)
        sink._stamp = {**self._stamp, "runner": role}
        return sink

    def write_snapshot(self, number: int, content: dict) -> None:
        """Write a snapshot of cause `number` beside the rank's file, and an event that names it."""
        if self._rank_file is None:
            return
        stamped = {"time": time.time(), **self._stamp, **content}
        folder, rank = self._rank_file.path.parent, self._rank_name
        name = f"{self._stamp['run']}.{number}"
        if write_snapshot(folder, rank, name, stamped):
            file = f"snapshot.{rank}.{name}.json"
            self.emit({"event": "snapshot", "cause": number, "file": file})

    def emit(self, event: dict) -> None:
        """Write `event`, a JSON-ready dict with its kind under "event"."""
        if self._file is None and self._rank_file is None:
            return
        event = {"time": time.time(), **self._stamp, "line": next(self._lines), **event}
        line = json.dumps(event) + "\n"
        if self._file is not None:
            self._file.append(line)
        if self._rank_file is not None:
            self._rank_file.append(line)
            if event["event"] == _REPEATED:
                again = json.dumps({**event, "repeated": True}) + "\n"
                self._rank_file.repeat_first(str(event.get("runner")), again)
