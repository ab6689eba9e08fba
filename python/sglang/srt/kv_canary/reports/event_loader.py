"""Reads event files back as typed events, those of one file or of a whole folder.

    loaded = load_events(Path("/var/log/sglang/canary"))
    for cause in loaded.of(CauseTold):
        print(cause.stamp.rank, cause.story.sentence)

A line that is no event is a `Problem`, not an error: a killed server may leave a part of one.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from .event_types import (
    Active,
    CauseTold,
    Checking,
    Containment,
    Event,
    EventFormatError,
    FindingsLost,
    Found,
    Health,
    InternalError,
    SnapshotWritten,
    Stamp,
    Statistics,
    SweepPass,
    event_of,
)
from .snapshot_loader import Snapshot, load_snapshot

__all__ = [
    "WHOLE_FILE",
    "Active",
    "CauseTold",
    "Checking",
    "Containment",
    "Event",
    "EventFormatError",
    "EventReading",
    "FindingsLost",
    "Found",
    "Health",
    "InternalError",
    "LoadedEvents",
    "Problem",
    "Snapshot",
    "SnapshotWritten",
    "Stamp",
    "Statistics",
    "SweepPass",
    "event_files",
    "event_key",
    "is_event_file_name",
    "is_evidence",
    "load_events",
    "load_snapshot",
    "missing_events",
    "oldest_first",
    "skipped_files",
    "skipped_problems",
]

# A number follows a dot; a date, as of logrotate's `dateext`, a hyphen
_NAME = re.compile(r"(?P<stem>.*\.jsonl)(?:[.-](?P<number>\d[\d-]*))?(?P<packed>\.gz)?")
_SIMILAR = ".jsonl"  # in the name of a file that may be an event file
_RESULTS = (".html", ".txt", ".tgz", ".tar.gz")  # names that reports and archives about one have
_SNAPSHOT = re.compile(r"snapshot\..*\.json")
WHOLE_FILE = 0
MOST_LISTINGS = 10  # of a folder: a flood may fill files faster than they are read
FileId = tuple[int, int]
E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that is no event, or a file that is not read."""

    file: Path
    line: int  # in the file, from 1. WHOLE_FILE: no line of it is read
    what: str


Watch = Callable[[Iterable[Event | Problem], Path], Iterable[Event | Problem]]


@dataclass(frozen=True, slots=True)
class LoadedEvents:
    """The events of some files, each once, in the order of `oldest_first`."""

    events: tuple[Event, ...]
    problems: tuple[Problem, ...]
    missing: dict[str, int]  # by run: events before the run's last one that are in no file

    def of(self, event_type: type[E]) -> tuple[E, ...]:
        """Those of one type."""
        return tuple(event for event in self.events if isinstance(event, event_type))


def event_files(path: Path) -> tuple[Path, ...]:
    """The event files at `path`, a file or a folder. Files of one rank are in the order in which they were written.

    Raises FileNotFoundError if there are none.
    """
    files = _files_at(path)
    if not files:
        raise FileNotFoundError(
            f"no event file at {str(path)!r}: expected a file, or a folder with files named *.jsonl, *.jsonl.N, "
            "*.jsonl-DATE or *.jsonl.gz"
        )
    return files


def _files_at(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    found = [(match, file) for file in _listed(path) if (match := _NAME.fullmatch(file.name))]
    return tuple(file for _, file in sorted(found, key=lambda each: _order(each[0])))


def skipped_files(path: Path) -> tuple[Path, ...]:
    """Files of the folder `path` that may be event files by their names, and that `event_files` leaves out."""
    similar = (file for file in _listed(path) if _may_hold_events(file.name))
    return tuple(sorted(file for file in similar if not _NAME.fullmatch(file.name)))


def is_event_file_name(name: str) -> bool:
    """Whether a folder's file of this name is read."""
    return bool(_NAME.fullmatch(name))


def is_evidence(file: Path) -> bool:
    """Whether `file` has the name of an event file, read or skipped, or of a snapshot."""
    return _may_hold_events(file.name) or bool(_SNAPSHOT.fullmatch(file.name))


def _may_hold_events(name: str) -> bool:
    return _SIMILAR in name and not name.endswith(_RESULTS)


def _listed(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []


def _order(name: re.Match[str]) -> tuple[str, float]:
    """The file without a number is the newest."""
    return name["stem"], float((name["number"] or "inf").replace("-", ""))


def _lines_of(file: Path, opened: BinaryIO) -> Iterator[Event | Problem]:
    """The lines of one event file, also a packed one (`.gz`). Empty lines are skipped."""
    number = 0
    lines: Iterable[bytes] = gzip.GzipFile(fileobj=opened) if file.suffix == ".gz" else opened
    try:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parsed(file, number, line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Problem(file, number + 1, f"the archive is damaged from here on: {error}")


def _parsed(file: Path, number: int, line: bytes) -> Event | Problem:
    try:
        return event_of(json.loads(line))
    except EventFormatError as error:
        return Problem(file, number, str(error))
    except (ValueError, RecursionError):
        return Problem(file, number, "not JSON: a part of a line, or a damaged one")


def load_events(path: Path, watch: Watch | None = None) -> LoadedEvents:
    """All events at `path`, a file or a folder. `watch` passes on what is read of a file, and may show progress.

    Lines that are in several files count once. Raises FileNotFoundError if there is no event file, and OSError for a
    file that cannot be read.
    """
    reading = EventReading(path, watch)
    events: dict[object, Event] = {}
    for _, found in reading.files():
        for event in found:
            events.setdefault(event_key(event), event)
    ordered = oldest_first(events.values())
    return LoadedEvents(ordered, reading.problems, missing_events(ordered))


class EventReading:
    """Reads the event files at `path`, also while a server moves and deletes them.

    `watch` passes on what is read of a file, and may show progress.
    """

    def __init__(self, path: Path, watch: Watch | None = None) -> None:
        self._path = path
        self._watch = watch
        self._read: set[tuple[FileId, Path]] = set()
        self._gone: dict[FileId, Path] = {}
        self._problems: dict[FileId, list[Problem]] = {}  # of the last reading of each file
        self._lines: set[tuple[str, int]] = set()

    def files(self) -> Iterator[tuple[Path, Iterator[Event]]]:
        """Each file with those of its events that no file before had. Read all of one before you ask for the next.

        Raises FileNotFoundError if there is no event file, and OSError for a file that cannot be read.
        """
        event_files(self._path)
        for _ in range(MOST_LISTINGS):
            listed = [each for each in _identified(self._path) if each not in self._read]
            if not listed:
                return
            for identity, file in listed:
                try:
                    opened = file.open("rb")
                except FileNotFoundError:  # under another name, or deleted
                    self._gone[identity] = file
                    continue
                with opened:
                    yield file, self._events(file, opened)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What was not read. Complete once all files are read."""
        known = {identity for identity, _ in self._read}
        gone = [file for identity, file in self._gone.items() if identity not in known]
        return (
            *skipped_problems(self._path),
            *(problem for found in self._problems.values() for problem in found),
            *(Problem(file, WHOLE_FILE, "deleted before it was read") for file in gone),
        )

    def _events(self, file: Path, opened: BinaryIO) -> Iterator[Event]:
        identity = _identity(os.fstat(opened.fileno()))  # the name may lead to another file by now
        self._read.add((identity, file))
        problems = self._problems[identity] = []
        lines: Iterable[Event | Problem] = _lines_of(file, opened)
        for found in lines if self._watch is None else self._watch(lines, file):
            if isinstance(found, Problem):
                problems.append(found)
            elif self._is_new(found):
                yield found

    def _is_new(self, event: Event) -> bool:
        """Or a copy with which a further file begins."""
        number = _number_of(event)
        if number is None or event.stamp.repeated:
            return True
        is_new = number not in self._lines
        self._lines.add(number)
        return is_new


def _identified(path: Path) -> Iterator[tuple[FileId, Path]]:
    for file in _files_at(path):
        with suppress(FileNotFoundError):
            yield _identity(file.stat()), file


def _identity(stat: os.stat_result) -> FileId:
    """The same under another name. A deleted file's may be given to a later file."""
    return stat.st_dev, stat.st_ino


def skipped_problems(path: Path) -> Iterator[Problem]:
    """One for each of `skipped_files`."""
    for file in skipped_files(path):
        yield Problem(file, WHOLE_FILE, "skipped: by its name it is no event file")


def event_key(event: Event) -> object:
    """Equal for copies of one line. A line without a number has no copies."""
    return _number_of(event) or id(event)


def _number_of(event: Event) -> tuple[str, int] | None:
    run, line = event.stamp.run, event.stamp.line
    return None if run is None or line is None else (run, line)


def oldest_first(events: Iterable[Event]) -> tuple[Event, ...]:
    """Those of a process as it wrote them, also if its clock was set back. Processes are merged by time."""
    latest: dict[str | None, float] = defaultdict(lambda: -math.inf)
    placed: list[tuple[float, Event]] = []
    for event in sorted(events, key=lambda event: (event.stamp.line or 0, event.stamp.time)):
        run, time = event.stamp.run, event.stamp.time
        if event.stamp.line is not None:
            latest[run] = time = max(time, latest[run])
        placed.append((time, event))
    return tuple(event for _, event in sorted(placed, key=lambda each: each[0]))


def missing_events(events: Iterable[Event]) -> dict[str, int]:
    """By run: events before the run's last one that are not in `events`."""
    lines: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.stamp.run is not None and event.stamp.line is not None:
            lines[event.stamp.run].append(event.stamp.line)
    return {run: gone for run, seen in lines.items() if (gone := max(seen) - len(seen))}
