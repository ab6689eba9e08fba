"""Files with the records of stored pages. A file appears whole, and only one server creates it.

So the folder needs hard links. Servers of several users can share it: files have the modes that its pages have.

Beside them lie the revoked names of servers. Their files have no suffix of SGLang's, so that it evicts none of them.
What servers store at this moment is announced in a folder: SGLang leaves folders alone when it clears its storage.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE, S_IRWXU
from typing import NamedTuple

KEY_PREFIX = "kvc:"  # before the page's key
REVOKED_PREFIX = "kvc-revoked-"  # before the name
STORING = "kvc-storing"  # the folder with announcements; it is there as long as it holds one
_MOST_TRIES = 1000
_PART = ".part"  # suffix of a file that is not whole yet
TAKEN_OVER = b"KVCT"  # before records; an older canary takes them for another version's
MOST_SIGHTINGS = 4096  # of files that other servers have created
SIGHTING_S = 3600.0  # after which one makes room for another: its page is not asked for any more
# What `link` says on a file system without hard links. The new file is there already, so writing is allowed.
_NO_HARD_LINKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EMLINK)


class NoHardLinksError(OSError):
    """The storage folder is on a file system without them."""


class _Version(NamedTuple):
    """Of a file: it differs once the file is replaced."""

    inode: int
    mtime_ns: int
    size: int


def with_page(page: Path) -> Callable[[], None]:
    """What removes the records of `page`, once the page itself is removed.

    Records that differ then stay: another server has begun to store the page again.
    """
    path = page.with_name(KEY_PREFIX + page.name)
    before = _version(path)

    def remove() -> None:
        if before is not None and _version(path) == before:
            path.unlink(missing_ok=True)

    return remove


def _not_told(_: str) -> None:
    """The backend remembers nothing of its pages."""


def _itself(key: str) -> tuple[str, ...]:
    """A page is one file."""
    return (key,)


class RecordFiles:
    """`path_of` gives the path of a key's file in the storage folder.

    `page_gone` tells the backend that the page of a key is not there any more. It may remember that page.
    `files_of` gives the keys of all files of a page. The page is there if all of them are.
    """

    def __init__(
        self,
        path_of: Callable[[str], str],
        page_gone: Callable[[str], None] = _not_told,
        files_of: Callable[[str], Sequence[str]] = _itself,
    ) -> None:
        self._path_of = path_of
        self._files_of = files_of
        self.page_gone = page_gone
        self._has_hard_links = True  # until the first try
        self._sightings: OrderedDict[str, tuple[_Version, float]] = OrderedDict()  # the first ones

    @property
    def folder(self) -> Path:
        return Path(self._path_of("")).parent

    def _of_revoked(self, name: bytes) -> Path:
        return self.folder / f"{REVOKED_PREFIX}{name.hex()}"

    def revoke(self, name: bytes) -> None:
        """No server uses what was stored under `name`, from now on. Stays as long as the folder."""
        self._of_revoked(name).touch()

    def is_revoked(self, name: bytes) -> bool:
        return _exists(self._of_revoked(name))

    def announce(self, keys: Iterable[str]) -> Path:
        """Tell all servers that this one is about to store these pages. For `retract`.

        Raises OSError if the folder cannot be written to, or no records can be created there.
        """
        if not self._has_hard_links:
            raise self._no_hard_links()
        folder = self.folder / STORING
        path = folder / os.urandom(16).hex()
        names = "\n".join(self.path(key).name for key in keys)
        for _ in range(_MOST_TRIES):
            _make_as_open(folder)
            with suppress(FileNotFoundError):  # another server has just removed the empty folder
                with _written_beside(path, names.encode()) as whole:
                    whole.replace(path)
                return path
        raise FileNotFoundError(folder)

    def retract(self, announcement: Path) -> None:
        announcement.unlink(missing_ok=True)
        with suppress(OSError):  # it holds others, or is gone
            announcement.parent.rmdir()

    def is_being_stored(self, key: str) -> bool:
        """Whether a server may be storing the page. One that has ended on the way counts, too."""
        name = self.path(key).name
        try:
            announcements = list((self.folder / STORING).iterdir())
        except FileNotFoundError:
            return False
        return any(name in _lines(path) for path in announcements if path.suffix != _PART)

    def path(self, key: str) -> Path:
        return Path(self._path_of(KEY_PREFIX + key))

    def exists(self, key: str) -> bool:
        return _exists(self.path(key))

    def read(self, key: str) -> bytes | None:
        """None: there is none."""
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def unchanged_s(self, key: str) -> float:
        """Seconds since this process saw these records first; 0 if it sees them now, or if they are gone.

        The clocks of other machines do not count, nor does a step of this one's.
        """
        now, version = time.monotonic(), _version(self.path(key))
        if version is None:
            return 0.0
        seen, since = self._sightings.get(key, (None, now))
        if seen == version:
            return now - since
        self.lose_sight(key)
        if self._has_room(now):
            self._sightings[key] = version, now
        return 0.0

    def _has_room(self, now: float) -> bool:
        """For one more sighting. Recent ones stay: if all were replaced in turn, none would become old."""
        if len(self._sightings) < MOST_SIGHTINGS:
            return True
        key, (_, since) = next(iter(self._sightings.items()))
        if now - since < SIGHTING_S:
            return False
        self.lose_sight(key)
        return True

    def lose_sight(self, key: str) -> None:
        """The page is there, or this server stores it."""
        self._sightings.pop(key, None)

    def create(self, key: str, data: bytes) -> bool:
        """False if there is one already. Raises OSError if the folder cannot be written to."""
        if not self._has_hard_links:
            raise self._no_hard_links()
        path = self.path(key)
        with _written_beside(path, data) as whole:
            try:
                os.link(whole, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                self._has_hard_links = False
                raise self._no_hard_links() from error
        return True

    def _no_hard_links(self) -> NoHardLinksError:
        return NoHardLinksError(errno.EOPNOTSUPP, "it has no hard links")

    def take_over(self, key: str, data: bytes) -> bytes:
        """Replace the records of another server. Returns what the file holds then.

        That server may still store its page, so the new records say that they may not fit the page.
        Raises OSError if the folder cannot be written to.
        """
        path, data = self.path(key), TAKEN_OVER + data
        with _written_beside(path, data) as whole:
            whole.replace(path)
        return data

    def remove(self, key: str) -> None:
        with suppress(FileNotFoundError):
            self.path(key).unlink()

    def has_page(self, key: str) -> bool:
        return all(_exists(Path(self._path_of(file))) for file in self._files_of(key))

    def remove_page(self, key: str) -> None:
        """The page itself, not its records."""
        for file in self._files_of(key):
            Path(self._path_of(file)).unlink(missing_ok=True)
        self.page_gone(key)


def _exists(path: Path) -> bool:
    """Raises OSError if that is unknown. `Path.exists` of newer Pythons says no then."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _version(path: Path) -> _Version | None:
    """None: there is no such file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return _Version(status.st_ino, status.st_mtime_ns, status.st_size)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []


def _make_as_open(folder: Path) -> None:
    """Who may write to the folder around `folder` may write to this one. It appears with these rights."""
    if folder.is_dir():
        return
    around = folder.parent.stat()
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", suffix=_PART, dir=folder.parent))
    try:
        with suppress(OSError):  # the user is no member of that group, or the mount has no groups
            os.chown(made, -1, around.st_gid)
        with suppress(OSError):  # the mount decides
            made.chmod(S_IMODE(around.st_mode) | S_IRWXU)
        made.rename(folder)
    except OSError as error:
        another_made_it = error.errno in (errno.EEXIST, errno.ENOTEMPTY) or folder.is_dir()
        if not another_made_it:
            raise
    finally:
        with suppress(FileNotFoundError):  # it was renamed
            made.rmdir()


@contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """A file with `data` in the folder of `path`. It is removed in the end, also if it could not be written."""
    whole = path.with_name(f"{os.urandom(16).hex()}{_PART}")
    try:
        with whole.open("xb") as file:  # a page has the same mode: the umask decides
            file.write(data)
        yield whole
    finally:
        whole.unlink(missing_ok=True)  # it may have been renamed
