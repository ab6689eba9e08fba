"""The event file of one rank in the folder of SGLANG_KV_CANARY_EVENTS_DIR. Bounded in size by rotation."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .event_file import EventFile, FileInUseError

if TYPE_CHECKING:  # a report is read where no SGLang is
    from ..config import CanaryConfig

SETTING = "SGLANG_KV_CANARY_EVENTS_DIR"
MOST_WRITERS = 1000  # processes of one rank name in one folder


@dataclass(frozen=True, slots=True)
class EventFolder:
    """Where the files of all ranks lie, and how much room each rank takes."""

    path: str
    file_bytes: int  # a file that would grow beyond it is put aside
    files: int  # of one rank, the open one included

    @classmethod
    def of(cls, config: CanaryConfig) -> EventFolder | None:
        """None if it is off."""
        if not config.events_dir:
            return None
        return cls(config.events_dir, config.events_file_bytes, config.events_files)


class RankFile:
    """The file `events.NAME.jsonl`, and the full ones before it: `events.NAME.jsonl.1` is the oldest.

    To rotate is to rename the full file and to create the next one, so a reader sees each line once. If another process
    writes to a file of this name, this one is `events.NAME-2.jsonl`. Raises CanaryConfigError if no file can be opened.
    """

    def __init__(self, folder: EventFolder, name: str) -> None:
        self._folder = folder
        self._file = _first_free(Path(folder.path), name)
        self._first_lines: dict[str, str] = {}
        self.deleted = 0  # full files, since the start
        self._delete_oldest()

    @property
    def path(self) -> Path:
        return Path(self._file.path)

    @property
    def lost(self) -> int:
        """Lines."""
        return self._file.lost

    def repeat_first(self, key: str, line: str) -> None:
        """Begin each further file with `line`, instead of the earlier one of the same `key`."""
        self._first_lines[key] = line

    def append(self, line: str) -> None:
        """Write `line`, ASCII text that ends in a newline."""
        size = self._file.size
        if size and size + len(line) > self._folder.file_bytes:
            self._rotate()
        self._file.append(line)

    def _rotate(self) -> None:
        full = f"{self._file.path}.{1 + max(self._numbers(), default=0)}"
        try:
            os.rename(self._file.path, full)
        except FileNotFoundError:
            pass  # somebody moved it away
        except OSError as error:
            self._file.complain(f"cannot rotate its event file: {error}. It grows further")
            return
        self._file.reopen()
        for line in self._first_lines.values():
            self._file.append(line)
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        numbers = self._numbers()
        for number in numbers[: max(0, len(numbers) + 1 - self._folder.files)]:
            with suppress(OSError):
                os.unlink(f"{self._file.path}.{number}")
                self.deleted += 1

    def _numbers(self) -> list[int]:
        """Of the full files, oldest first. None in a folder that is gone."""
        pattern = re.compile(re.escape(self.path.name) + r"\.(\d+)")
        try:
            names = os.listdir(self._folder.path)
        except OSError:
            return []
        found = (pattern.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in found if match)


def rank_name(rank: int, pp_rank: int | None, dp_rank: int | None) -> str:
    """For example `dp1.pp0.tp3`; without data and pipeline parallelism `tp3`."""
    parts = (("dp", dp_rank), ("pp", pp_rank), ("tp", rank))
    return ".".join(f"{name}{number}" for name, number in parts if number is not None)


def _first_free(folder: Path, name: str) -> EventFile:
    for suffix in itertools.islice(_suffixes(), MOST_WRITERS):
        try:
            return EventFile(str(folder / f"events.{name}{suffix}.jsonl"), SETTING, is_locked=True)
        except FileInUseError:
            continue
    raise FileInUseError(
        f"{SETTING}={str(folder)!r}: {MOST_WRITERS} processes write files for {name} there. Expected one folder for "
        "each server; set the variable to another one."
    )


def _suffixes() -> Iterator[str]:
    yield ""
    yield from (f"-{number}" for number in itertools.count(2))
