"""Work of the scheduler's thread that must come after the forwards in flight, and after what they read was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..runner.manager import CanaryManager

__all__ = ["on_forward_stream"]


@contextmanager
def on_forward_stream(scheduler: Any, manager: CanaryManager) -> Iterator[None]:
    if not manager.state.summary.is_cuda or not scheduler.enable_overlap:
        yield
        return
    with torch.cuda.stream(scheduler.forward_stream):
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        yield
