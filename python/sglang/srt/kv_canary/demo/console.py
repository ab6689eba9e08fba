"""What a command prints while it works."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 1.0
PLAIN_EVERY_S = 10.0  # between two progress lines when the output is not a terminal


def say(text: str = "", indent: int = 0) -> None:
    print(textwrap.indent(text, " " * indent), flush=True)


class StatusLine:
    """A line that is rewritten in a terminal, and printed occasionally elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._next = time.monotonic() + PLAIN_EVERY_S

    def show(self, text: str) -> None:
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", flush=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + PLAIN_EVERY_S
            say(text)

    def done(self, text: str) -> None:
        """Print the last state, which stays."""
        print(f"\r\x1b[K{text}" if self._terminal else text, flush=True)


@contextmanager
def seconds_shown(text: str) -> Iterator[None]:
    """Shows `text` and the seconds that the body has taken so far."""
    line, start, over = StatusLine(), time.monotonic(), threading.Event()

    def seconds() -> str:
        return f"{text} {time.monotonic() - start:.0f} s"

    def tick() -> None:
        while not over.wait(TICK_S):
            line.show(f"{seconds()} ...")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        over.set()
        ticker.join()
    line.done(seconds())
