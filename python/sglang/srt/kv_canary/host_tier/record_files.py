"""Files with the records of stored pages. A file appears whole, and only one server creates it.

Beside them lie the revoked names of servers. Their files have no suffix of SGLang's, so that it evicts none of them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KEY_PREFIX = "kvc:"  # before the page's key
REVOKED_PREFIX = "kvc-revoked-"  # before the name


class RecordFiles:
    """`path_of` gives the path of a key's file in the storage folder."""

    def __init__(self, path_of: Callable[[str], str]) -> None:
        self._path_of = path_of

    @property
    def folder(self) -> Path:
        return Path(self._path_of("")).parent

    def _of_revoked(self, name: bytes) -> Path:
        return self.folder / f"{REVOKED_PREFIX}{name.hex()}"

    def revoke(self, name: bytes) -> None:
        """No server uses what was stored under `name`, from now on. Stays as long as the folder."""
        self._of_revoked(name).touch()

    def is_revoked(self, name: bytes) -> bool:
        return self._of_revoked(name).exists()

    def path(self, key: str) -> Path:
        return Path(self._path_of(KEY_PREFIX + key))

    def exists(self, key: str) -> bool:
        return self.path(key).exists()

    def read(self, key: str) -> bytes | None:
        """None: there is none."""
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def age_s(self, key: str) -> float:
        """Seconds since it was created; 0 if it is gone."""
        try:
            return time.time() - self.path(key).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def create(self, key: str, data: bytes) -> bool:
        """False if there is one already. Raises OSError if the folder cannot be written to."""
        path = self.path(key)
        with _written_beside(path, data) as whole, suppress(FileExistsError):
            os.link(whole, path)
            return True
        return False

    def replace(self, key: str, data: bytes) -> None:
        """Raises OSError if the folder cannot be written to."""
        path = self.path(key)
        with _written_beside(path, data) as whole:
            whole.replace(path)

    def remove(self, key: str) -> None:
        with suppress(FileNotFoundError):
            self.path(key).unlink()

    def remove_page(self, key: str) -> None:
        """The page itself, not its records."""
        with suppress(FileNotFoundError):
            Path(self._path_of(key)).unlink()


@contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """A file with `data` in the folder of `path`. It is removed in the end, also if it could not be written."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        yield Path(name)
    finally:
        with suppress(FileNotFoundError):  # it was renamed
            os.unlink(name)
