"""Keeps tensors alive that belong to another stream until work on the current stream has read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..cuda_streams import EventQueue


class BorrowedTensors(EventQueue):
    """As `Tensor.record_stream`, but one event serves many tensors, and no allocation has to ask for it."""

    def keep(self, tensors: Sequence[torch.Tensor], beside: Any = None) -> bool:
        """Until what is queued on the current stream has run, and `take_done` is called, which has `beside`.

        False: they are tensors of a CPU, and nothing is queued.
        """
        if not (tensors and tensors[0].is_cuda):
            return False
        self.add((tensors, beside), tensors[0])
        return True
