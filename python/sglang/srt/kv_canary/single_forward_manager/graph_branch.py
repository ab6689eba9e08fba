"""A second branch of the CUDA graph under capture. Work on it costs almost no time beside the model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


class GraphBranch:
    """`fork` before the layers, `join` after them, both under stream capture.

    Memory that the branch reads must live until the join: capture reuses freed memory without regard to streams. The
    stream comes from torch's pool and may also be a side stream of the model. Then the work of both is serialised.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self.open = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches in here run after earlier launches, and beside later ones."""
        current = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream(current.device)
        self._stream.wait_stream(current)
        self.open = True
        with torch.cuda.stream(self._stream):
            yield

    def abandon(self) -> None:
        """The capture has failed. Join, so that it ends with its own error and not with that of an open branch."""
        with suppress(RuntimeError):
            self.join()
        self.open = False

    def join(self) -> None:
        """Later launches also run after the branch. Does nothing if there is no branch."""
        if self.open:
            torch.cuda.current_stream().wait_stream(self._stream)
        self.open = False
