"""Which lines of some files run; nothing else is traced."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Lines = dict[str, set[int]]  # file -> lines


class LineTrace:
    def __init__(self, files: dict[str, str]) -> None:
        """`files`: path -> name."""
        self._files = files
        self._lines: defaultdict[str, set[int]] = defaultdict(set)

    @contextmanager
    def running(self) -> Iterator[Lines]:
        """What runs inside is in the result afterwards."""
        self._lines.clear()
        lines: Lines = {}
        before = sys.gettrace()
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        try:
            yield lines
        finally:
            sys.settrace(before)
            threading.settrace(None)
            lines.update({name: set(found) for name, found in self._lines.items()})

    def _on_call(self, frame: FrameType, _event: str, _arg: Any):
        name = self._files.get(frame.f_code.co_filename)
        if name is None:
            return None
        add = self._lines[name].add

        def on_line(frame: FrameType, _event: str, _arg: Any):
            add(frame.f_lineno)
            return on_line

        return on_line
