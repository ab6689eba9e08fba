"""A scheduler that is paused: `/pause_generation` in mode `in_place` or `retract`.

Until `/continue_generation` its loop has neither steps nor idle ticks. It takes up messages only. So that call attends
to what was found late and to what others ask of the process, as long as the pause lasts. No other step pays for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .context import context

TAKES_UP = "process_input_requests"  # the scheduler's method
PERIOD_S = 0.01  # the loop does not rest


class WhilePaused:
    """Stands for `scheduler.process_input_requests` until the scheduler goes on."""

    def __init__(self, scheduler: Any, attend: Callable[[], None]) -> None:
        self._scheduler, self._attend = scheduler, attend
        self._original = getattr(scheduler, TAKES_UP)
        # Only another plugin has put one into the object itself
        self._was_own = TAKES_UP in vars(scheduler)
        self._next = 0.0  # time.monotonic()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._original(*args, **kwargs)
        if not self._scheduler._engine_paused:
            self._give_back()
        elif (now := time.monotonic()) >= self._next:
            self._next = now + PERIOD_S
            self._attend()
        return returned

    def _give_back(self) -> None:
        own = vars(self._scheduler)
        if own.get(TAKES_UP) is not self:
            return  # another plugin has wrapped it since
        if self._was_own:
            own[TAKES_UP] = self._original
        else:
            del own[TAKES_UP]


def attend_while_paused(scheduler: Any, attend: Callable[[], None]) -> None:
    """`attend` is called when the paused `scheduler` takes up messages, at most once in PERIOD_S."""
    if not context.active or isinstance(vars(scheduler).get(TAKES_UP), WhilePaused):
        return
    setattr(scheduler, TAKES_UP, WhilePaused(scheduler, attend))
