"""A second branch of the CUDA graph under capture. Work on it costs almost no time beside the model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class GraphBranch:
    """Work that begins at a `point` of the captured stream, and has ended at the `join`.

    The work may be captured long after its point. So the stream's own next kernel comes first, and stays on the
    hardware queue of the kernels before it: the other one waits for 7 us. Memory that the branch reads must live until
    the join: capture reuses freed memory without regard to streams. The branch's stream comes from torch's pool and may
    also be a side stream of the model. Then the work of both is serialised.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._open = False

    def point(self) -> torch.cuda.Event:
        """Where the captured stream is now."""
        point = torch.cuda.Event()
        point.record()
        return point

    @contextmanager
    def after(self, point: torch.cuda.Event) -> Iterator[None]:
        """Launches in here run after what was captured before `point`, and after earlier launches of the branch.

        They must allocate no memory: it would be that of the model's side streams.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(torch.cuda.current_device())
        self._stream.wait_event(point)
        self._open = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Later launches of the captured stream also run after the branch. Does nothing if there is no branch."""
        if self._open:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._open = False
