"""Problems that come back, such as a full disk: in the log at most once a minute."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0


class Complaints:
    """Those about one thing, such as a file."""

    def __init__(self) -> None:
        self._next_log = 0.0  # time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether none was logged within the last minute."""
        return time.monotonic() >= self._next_log

    def log(self, problem: str) -> None:
        """Log `problem`, unless another was logged within the last minute."""
        if self.is_due:
            self._next_log = time.monotonic() + LOG_EVERY_S
            logger.error("kv-canary %s", problem)
