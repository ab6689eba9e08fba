"""Memory that the scheduler processes of one host share."""

from __future__ import annotations

import mmap
import os
import tempfile

from .rank_group import RankGroup

__all__ = ["shared_memory"]


def shared_memory(ranks: RankGroup, size: int) -> mmap.mmap | None:
    """`size` bytes of zeros, at least one for each rank. All ranks must ask.

    None, on all of them: they share no memory, because they are on several hosts, or TMPDIR has no room for it.
    """
    path = _new_file(size) if ranks.rank == 0 else ""
    path = ranks.gather(path)[0]
    memory = _mapped(path, size)
    # A file of the same name on another host would be mapped, too. So each rank shows that it is the same one.
    if memory is not None:
        memory[ranks.rank] = ranks.rank + 1 & 0xFF
    everywhere = all(ranks.gather(memory is not None))
    seen = everywhere and memory[: ranks.size] == bytes(r + 1 & 0xFF for r in range(ranks.size))
    everywhere = all(ranks.gather(seen))
    if ranks.rank == 0 and path:
        os.unlink(path)
    if not everywhere:
        return None
    memory[ranks.rank] = 0
    ranks.gather(None)  # nobody uses it before all bytes are 0
    return memory


def _new_file(size: int) -> str:
    """ "" if there is no place for it."""
    path = ""
    try:
        handle, path = tempfile.mkstemp(prefix="kv_canary_bell_")
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(size))
    except OSError:  # a file can be made on a full disk, and not be written
        if path:
            os.unlink(path)
        return ""
    return path


def _mapped(path: str, size: int) -> mmap.mmap | None:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):
        return None
