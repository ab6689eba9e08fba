"""Chunks that SGLang sends while a forward may still compute them, each with the event of that forward.

Over Mooncake SGLang waits for the event before it reads KV. Over NIXL it drops the event, and KV goes as it is. Records
wait, so they are those of the computed KV, whatever KV has gone before them.
"""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["EarlyChunks"]


class EarlyChunks:
    def __init__(self) -> None:
        self._events: dict[int, Any] = {}  # by the id of the chunk's pages, while these live

    def note(self, pages: Any, event: Any | None) -> None:
        """The chunk with `pages`, an array, is queued. None: what computes it is over."""
        if event is not None:
            self._events[id(pages)] = event
            weakref.finalize(pages, self._events.pop, id(pages), None).atexit = False

    def await_forward(self, pages: Any) -> None:
        """`pages`: of a chunk, or the first of them."""
        for array in (pages, getattr(pages, "base", None)):
            if (event := self._events.get(id(array))) is not None:
                event.synchronize()
