"""What of a long prefill's checks comes later than that of others, so that its first token does not wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..launch.launcher import Launcher
from ..plan.kept_inputs import KeptInputs
from ..plan.plan_input import ForwardPlan
from .late_content import LateContent
from .late_head import LateHead

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

__all__ = ["LateWork"]

# New tokens of a forward whose HEAD waits. For fewer, what is saved is less than what the copy of the inputs costs.
MIN_TOKENS = 512


class LateWork:
    """Of one runner. While it is `open`, a step runs that will write what content is due.

    `events`: applies what the allocators have done since the last forward, right before HEAD. None: nothing waits for
    HEAD.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.open = False
        self.events: Callable[[], object] | None = None
        self.content = LateContent(launcher)
        self._head = LateHead(launcher)

    def may_take_head(self, new_lens: Sequence[int]) -> bool:
        """Whether HEAD of such a prefill may come after the layers, if all rows keep their prefixes until then."""
        return self.open and self._head.can_wait and sum(new_lens) >= MIN_TOKENS

    def apply_events(self) -> None:
        """Those that wait. Only while `events` is not None."""
        events, self.events = self.events, None
        events()

    def take_head(self, batch: ForwardBatch) -> KeptInputs | None:
        """Leave HEAD of `batch` for after the layers, if `may_take_head`. None: it must run now. Not for captures."""
        return self._head.take(batch) if self.open else None

    def take_content(self, plan: ForwardPlan) -> bool:
        """Leave the content of `plan`'s new tokens for later. False: it must be written now. Not for captures."""
        if not (self.open and self.content.can_wait) or plan.write.ext_lens is None:
            return False
        if plan.num_tokens < self.content.min_tokens:
            return False
        self.content.due = plan
        return True

    def forget(self) -> None:
        """The forward has raised, or records are out of date. Events wait in their list for the next forward."""
        self.content.forget()
        self.events = None
