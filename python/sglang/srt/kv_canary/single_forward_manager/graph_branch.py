"""A second branch of the CUDA graph under capture: what runs there costs the model's layers next to no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


class GraphBranch:
    """`fork` before the layers, `join` behind them, both under stream capture.

    Memory that the branch reads must live until the join: capture hands freed memory on without looking at streams.
    The stream is one of torch's pool and may be a model's own side stream, too: then their work follows each other.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self.open = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches in here follow those so far, and run beside those to come."""
        current = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream(current.device)
        self._stream.wait_stream(current)
        self.open = True
        with torch.cuda.stream(self._stream):
            yield

    def abandon(self) -> None:
        """The capture has failed; joined, it ends with its own error and not with that of an open branch."""
        with suppress(RuntimeError):
            self.join()
        self.open = False

    def join(self) -> None:
        """Launches from here on follow the branch's, too. Does nothing where there is none."""
        if self.open:
            torch.cuda.current_stream().wait_stream(self._stream)
        self.open = False
