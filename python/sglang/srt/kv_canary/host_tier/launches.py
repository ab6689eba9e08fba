"""Lets another stream wait for all forwards and checks of arrivals that have been launched."""

from __future__ import annotations

from typing import Any

import torch

from ..cuda_streams import record
from ..runner.step_observer import Observed, StepObserver


class Launches(StepObserver):
    """Under overlap scheduling a launched forward still writes the last token of a request that has finished.

    The prefix cache has its slot, and SGLang copies it to host memory. Its stream waits for the schedule stream only.
    KV that arrives is cached at once, while its records still become this server's own.
    """

    def __init__(self) -> None:
        self._last: Any | None = None  # event after the last launch; None on the CPU

    def after_forwards(self, manager: Observed) -> None:
        self.after_late_launches(manager)

    def after_late_launches(self, manager: Observed) -> None:
        if manager.state.summary.is_cuda:
            if self._last is None:
                self._last = torch.cuda.Event()
            record(self._last, manager.state.summary)

    def await_on(self, stream: Any) -> None:
        """Later work on `stream` runs after these launches."""
        if self._last is not None:
            stream.wait_event(self._last)
