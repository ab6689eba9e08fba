"""Room for the frames of a thread, so that calls do not ask the system for memory.

CPython keeps frames in chunks of 16 KiB, from 3.11 on. A call that no longer fits gets a chunk from the system. Until
later patches of 3.13 and 3.14 it gives that back when it returns. A loop that calls across such a boundary pays two
system calls and a page fault each time (https://github.com/python/cpython/issues/142183). Hooks are among the callers
of SGLang's loop over layers. Each adds a frame, and may move the loop's calls onto a boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["ROOM_BYTES", "with_room_for_frames"]

P = ParamSpec("P")
T = TypeVar("T")

# A chunk is twice as large until its first frame fits (`push_chunk` of CPython's pystate.c). A frame of a little more
# than half of 256 KiB gets one of that size, and leaves the rest to what it calls.
_CHUNK_BYTES = 256 * 1024
_SLOTS = _CHUNK_BYTES // 2 // 8 + 64  # of 8 bytes each; none of them is touched
ROOM_BYTES = _CHUNK_BYTES // 2 - 4096  # at least


def with_room_for_frames(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`call(...)`, with `ROOM_BYTES` in one chunk for the frames of all that it calls."""
    return call(*args, **kwargs)


with_room_for_frames.__code__ = with_room_for_frames.__code__.replace(co_stacksize=_SLOTS)
