"""One open event file: whole lines, each in one system call. Notices when the file is moved away."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

from ..errors import CanaryConfigError
from .complaints import Complaints

_NOT_REGULAR = "expected a regular file, got a folder, device, FIFO or socket"
WRITE_S = 0.001  # in which another process has written the rest of a line
LOOK_EVERY_S = 1.0  # how often to check that the path still leads to the open file


class FileInUseError(RuntimeError):
    """Another process holds the lock of the file."""


class EventFile:
    """Appends lines to the file at `path`, which is created with mode 0600.

    Several processes may append to one file, because a line is one write. With `is_locked` only one may: the file stays
    locked as long as it is open. A line that cannot be written (e.g. the disk is full) is lost, and the loss is logged.
    Raises CanaryConfigError, which names `setting`, for a path that cannot be a regular file, and FileInUseError.
    """

    def __init__(self, path: str, setting: str, is_locked: bool = False) -> None:
        self.path = path
        self._setting = setting
        self._is_locked = is_locked
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._fd, self._is_torn = self._open()
        self._end = self.size  # where the last line of this process ended
        self._next_look = time.monotonic() + LOOK_EVERY_S
        self._complaints = Complaints()
        self.lost = 0  # lines

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._fd).st_size

    @property
    def _is_deleted(self) -> bool:
        """Whether the open file has no name any more: at the path, nobody would see another line."""
        return os.fstat(self._fd).st_nlink == 0

    def append(self, line: str) -> None:
        """Write `line`, which ends in a newline."""
        self._reopen_if_moved()
        if self._is_deleted:
            self._lose(f"its event file was deleted, and {self.path} cannot be created")
            return
        size = self.size
        if size != self._end:  # another process has written since, perhaps to a disk that was full
            self._is_torn = _stays_within_a_line(self.path)
        error = "only a part of the event was written"
        data = ("\n" + line if self._is_torn else line).encode()
        try:
            written = os.write(self._fd, data)
        except OSError as raised:
            written, error = 0, str(raised)
        self._end = size + written
        if written == len(data):
            self._is_torn = False
            return
        self._is_torn |= written > 0
        self._lose(f"cannot write to its event file: {error}")

    def _lose(self, why: str) -> None:
        self.lost += 1
        self.complain(
            f"{why}; {self.lost} events lost so far. The log continues, but shows only some of many violations. "
            f"Make room for the file, create its folder, or set {self._setting} to another one"
        )

    def reopen(self) -> None:
        """Open the path again. After an error, which is logged, lines go to the old file."""
        try:
            fd, is_torn = self._open()
        except (OSError, CanaryConfigError, FileInUseError) as error:
            if not self._is_deleted:
                self.complain(
                    f"cannot reopen its event file, which was moved: {error}. It keeps writing to the old one"
                )
            return
        os.close(self._fd)
        self._fd, self._is_torn = fd, is_torn
        self._end = self.size

    def complain(self, problem: str) -> None:
        """Log `problem`, unless another was logged within the last minute."""
        self._complaints.log(problem)

    def _reopen_if_moved(self) -> None:
        now = time.monotonic()
        if now < self._next_look and not self._is_deleted:
            return
        self._next_look = now + LOOK_EVERY_S
        if not _is_at(self.path, self._fd):
            self.reopen()

    def _open(self) -> tuple[int, bool]:
        """(file descriptor for appending, whether the file ends in the middle of a line). Never blocks."""
        is_torn = _ends_within_a_line(self.path)
        # O_NONBLOCK: opening a FIFO that nobody reads would wait for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise CanaryConfigError(
                f"{self.path!r} of {self._setting} cannot be opened: {_why_not_opened(self.path, error)}"
            ) from error
        try:
            self._check(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd, is_torn

    def _check(self, fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CanaryConfigError(f"{self.path!r} of {self._setting} is refused: {_NOT_REGULAR}")
        if not self._is_locked:
            return
        try:
            # A lock of the process: unlike that of flock, children that outlive the server do not keep it.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise FileInUseError(f"another process writes to {self.path}") from error
        except OSError:
            pass  # a file system without locks


def _stays_within_a_line(path: str) -> bool:
    """Whether a line has no end, and nobody is writing it right now."""
    if not _ends_within_a_line(path):
        return False
    time.sleep(WRITE_S)
    return _ends_within_a_line(path)


def _ends_within_a_line(path: str) -> bool:
    """Whether a killed process left a line without its end. False if this cannot be determined."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        size = os.fstat(fd).st_size
        return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
    except OSError:
        return False
    finally:
        os.close(fd)


def _why_not_opened(path: str, error: OSError) -> str:
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        return f"there is no folder {folder!r}"
    if os.path.exists(path) and not os.path.isfile(path):
        return _NOT_REGULAR
    return error.strerror or str(error)


def _is_at(path: str, fd: int) -> bool:
    """Whether `fd` is the file at `path`. True if this cannot be determined."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
    except OSError:
        return True
