"""Work of the scheduler's thread that must come after the forwards in flight, and after what they read was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..runner.manager import CanaryManager
from .context import context
from .releases import release

__all__ = ["await_forwards", "on_forward_stream"]


@contextmanager
def on_forward_stream(scheduler: Any, manager: CanaryManager) -> Iterator[None]:
    if not manager.state.summary.is_cuda or not _have_a_stream(scheduler):
        yield
        return
    with torch.cuda.stream(scheduler.forward_stream):
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        yield


def _have_a_stream(scheduler: Any) -> bool:
    """Whether forwards run on a stream of their own. Those of pipeline stages do so without overlap, too."""
    return scheduler.enable_overlap or release().settled(scheduler.server_args).pp_size > 1


def await_forwards() -> None:
    """What follows on the current stream comes after what was launched on that of the forwards. The host goes on."""
    if context.forward_stream is not None:
        torch.cuda.current_stream().wait_stream(context.forward_stream)
