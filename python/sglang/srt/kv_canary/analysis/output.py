"""Writes results whole or not at all, and never over the event files that they are about."""

from __future__ import annotations

import io
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..reports.event_loader import event_files, is_evidence

PRIVATE = 0o600


class OutputIsInput(OSError):
    """The output would destroy an event file or a snapshot."""


def check_output(output: Path, inputs: Iterable[Path]) -> None:
    """Raises OutputIsInput if `output` is one of the event files at `inputs`, or has the name of evidence."""
    if not output.is_file():
        return
    files = (file for path in inputs for file in event_files(path))
    if is_evidence(output) or any(_is_same(output, file) for file in files):
        raise OutputIsInput(
            f"{str(output)!r} is an event file or a snapshot, and is not overwritten: choose another name with -o"
        )


def _is_same(output: Path, file: Path) -> bool:
    try:
        return output.samefile(file)
    except FileNotFoundError:  # a server has deleted it
        return False


@contextmanager
def whole_file(path: Path, mode: int | None = None) -> Iterator[io.BufferedWriter]:
    """A file that takes the place of `path` once the block ends without an error. After an error `path` is as it was.

    `mode`: its permissions. Without one, the former file's or the default ones. Raises OSError.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    former = target.stat() if target.exists() else None
    # A device or a FIFO has no place to take
    if former is not None and not stat.S_ISREG(former.st_mode):
        with target.open("wb") as out:
            yield out
        return
    part = target.with_name(f".kv-canary-{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb", opener=_opener(mode)) as out:
            if mode is None and former is not None:
                os.fchmod(out.fileno(), stat.S_IMODE(former.st_mode))
            yield out
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _opener(mode: int | None) -> Callable[[str, int], int]:
    return lambda path, flags: os.open(path, flags, 0o666 if mode is None else mode)
