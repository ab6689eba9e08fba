"""Fingerprints of long prefills that are written once the result is on its way to the host.

So the first token does not wait for them. Only fingerprints of new slots can wait: they find nothing. Until then the
content of these slots is unknown, and nothing is compared with it.
"""

from __future__ import annotations

from ..buffer_group import CanaryBufferGroup
from ..config import ContentMode
from ..launch.launcher import Launcher
from ..plan.plan_input import ForwardPlan

__all__ = ["LateContent", "content_can_wait"]

# Tokens of a forward. The bytes of fewer are read in less time than a launch of their own costs.
MIN_TOKENS = 512


class LateContent:
    """Of one runner. While it is `open`, a step runs that will call `write`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._can_wait = content_can_wait(launcher)
        self.open = False
        self.due: ForwardPlan | None = None

    def take(self, plan: ForwardPlan) -> bool:
        """Leave the content of `plan`'s new tokens for later. False: it must be written now. Not for captures."""
        if not (self.open and self._can_wait) or plan.write.ext_lens is None:
            return False
        if plan.num_tokens < MIN_TOKENS:
            return False
        self.due = plan
        return True

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
