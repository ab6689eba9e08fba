"""Work of the scheduler's thread that must come after the forwards in flight, and after what they read was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..runner.manager import CanaryManager
from .context import context

__all__ = ["await_forwards", "on_forward_stream"]


@contextmanager
def on_forward_stream(scheduler: Any, manager: CanaryManager) -> Iterator[None]:
    if not manager.state.summary.is_cuda or not scheduler.enable_overlap:
        yield
        return
    with torch.cuda.stream(scheduler.forward_stream):
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        yield


def await_forwards() -> None:
    """What follows on the current stream comes after what was launched on that of the forwards. The host goes on."""
    if context.forward_stream is not None:
        torch.cuda.current_stream().wait_stream(context.forward_stream)
