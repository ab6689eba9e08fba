"""Fingerprints of long prefills that are written once the result is on its way to the host.

So the first token does not wait for them. Only fingerprints of new slots can wait: they find nothing. Until then the
content of these slots is unknown, and nothing is compared with it.
"""

from __future__ import annotations

from ..buffer_group import CanaryBufferGroup
from ..config import ContentMode
from ..kernels.layout import content_bytes_per_token
from ..launch.launcher import Launcher
from ..plan.plan_input import ForwardPlan

__all__ = ["LateContent", "content_can_wait"]

# Bytes of new slots. Fewer take the GPU less than 17 us at 4 TB/s, and a launch of their own takes the host longer.
MIN_BYTES = 64 << 20


class LateContent:
    """Of one runner."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.can_wait = content_can_wait(launcher)
        # The fewest new tokens of a forward whose content waits
        bytes_each = content_bytes_per_token(launcher.groups, launcher.content_mode)
        self.min_tokens = -(-MIN_BYTES // max(1, bytes_each))
        self.due: ForwardPlan | None = None

    def write(self) -> None:
        """Write what is due, on the forward stream."""
        plan, self.due = self.due, None
        if plan is not None:
            self._launcher.write_content(plan)

    def forget(self) -> None:
        """Records are out of date: nothing is due."""
        self.due = None


def content_can_wait(launcher: Launcher) -> bool:
    """Whether slots have content, and keep their bytes until the result is known."""
    return launcher.content_mode is not ContentMode.NONE and all(map(_can_wait, launcher.groups))


def _can_wait(group: CanaryBufferGroup) -> bool:
    """False where slots may get other bytes before the step's result is known: their pages move."""
    sources = group.k_content + group.v_content
    moves = group.is_rebound or any(source.page_table is not None for source in sources)
    return group.stride == 1 and not moves
