"""Keeps tensors alive that belong to another stream until work on the current stream has read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ..cuda_streams import record


class BorrowedTensors:
    """As `Tensor.record_stream`, but one event serves many tensors, and no allocation has to ask for it."""

    def __init__(self) -> None:
        # For others to read: whether tensors are kept
        self.kept: deque[tuple[torch.cuda.Event, Sequence[torch.Tensor]]] = deque()
        self._spare: list[torch.cuda.Event] = []  # to be recorded again: making one takes longer

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Until what is queued on the current stream has run."""
        if not tensors or not tensors[0].is_cuda:
            return
        done = self._spare.pop() if self._spare else torch.cuda.Event()
        record(done, tensors[0])
        self.kept.append((done, tensors))

    def give_back(self) -> None:
        """Those that have been read. Never waits."""
        while self.kept and self.kept[0][0].query():
            self._spare.append(self.kept.popleft()[0])
