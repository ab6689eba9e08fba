"""SGLANG_KV_CANARY_ACTION=abort on pipeline stages: all of them act in the same micro-batch, whichever finds damage.

Stages cannot ask each other: each is at another micro-batch. So a later stage puts what it has found where the first
one sees it. The first stage decides. Its verdict goes along with the requests that SGLang passes from stage to stage.
Each stage carries it out before it takes up these requests. No stage waits for another one.

SGLang's stages must have the same number of free slots, or they schedule different batches. So nothing is freed or kept
by what one stage knows alone: the whole cache is dropped, and what a wrong row held comes back when the server is idle.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...runner.damage_desk import Damage
from ..guard import attempt_aside
from .mailbox import Mailbox
from .verdict import Verdict

__all__ = ["StageMark", "StagedContainment"]


@dataclass(frozen=True, slots=True)
class StageMark:
    """Among the requests that go from stage to stage."""

    verdict: Verdict
    drops: bool  # the whole prefix cache


@dataclass(slots=True)
class StagedContainment:
    """One per scheduler. `alone` is what a single stage would do. Used from the scheduler's thread."""

    alone: Any
    stage: int
    mailbox: Mailbox
    bell: None = None
    _mark: StageMark | None = None  # of this step, for the next stage
    _awaits: bool = False  # the verdict about what this stage has found
    _lost: list[torch.Tensor] = field(default_factory=list)  # slots of wrong rows, until a flush

    @property
    def rows(self) -> torch.Tensor:
        return self.alone.rows

    @property
    def withheld(self) -> Any:
        return self.alone.withheld

    @property
    def prefixes(self) -> Any:
        return self.alone.prefixes

    @property
    def may_miss_slots(self) -> bool:
        """Whether a leak may be damage that is not dealt with yet."""
        return self._awaits or self.alone.owned.disturbed or self.alone.desk.is_waiting

    def receiving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def received(self, requests: list[Any]) -> list[Any]:
        """The requests of a step, without the mark of the stage before."""
        self._mark = None
        if requests and isinstance(requests[-1], StageMark):
            self._mark = requests[-1]
            return requests[:-1]
        return requests

    def sent(self, requests: list[Any]) -> list[Any]:
        """What goes to the next stage with the `requests` of this step."""
        mark, self._mark = self._mark, None
        return requests if mark is None else [*requests, mark]

    def between_steps(self) -> None:
        """The requests of a step have arrived."""
        if self.stage == 0:
            self._decide()
        elif self.alone.desk.is_waiting:
            self._report()
        if self._mark is not None:
            self._awaits = False
            self.alone.carry_out(self._mark.verdict, self._mark.drops)
        # Otherwise each stage would free what only its own rows allow.
        if not self.alone.owned.disturbed:
            self.alone.tidy()

    def before_eviction(self) -> None:
        """Nothing: in the middle of a step the stages cannot agree."""

    def note_finished(self, request: Any) -> None:
        self.alone.note_finished(request)

    def has_wrong_row(self, request: Any) -> bool:
        return self.alone.has_wrong_row(request)

    def releasing(self, request: Any) -> AbstractContextManager[None]:
        """Around the release of the request's slots. Rows that may be wrong differ between stages."""
        if not self.alone.is_misled(request):
            return nullcontext()
        attempt_aside(self.alone.prefixes.pin, request)
        return self.alone.owned.deferring(self._lost)

    def on_idle(self) -> None:
        """Before SGLang looks for leaks. The same verdict has disturbed all stages."""
        if self.stage and self.alone.desk.is_waiting:
            self._report()
        if self.alone.owned.disturbed:
            self.alone.start_afresh()

    def after_clear(self, allocator: Any) -> None:
        self.alone.after_clear(allocator)
        self._lost.clear()

    def _report(self) -> None:
        desk = self.alone.desk
        found = desk.peek()
        # After an error the readers end all the same.
        resolved = attempt_aside(self.alone.resolved, found) or Damage(found.readers)
        left = self.mailbox.put(self.stage, resolved)
        if left is not None:
            desk.clear(left)
            self._awaits = True

    def _decide(self) -> None:
        desk, elsewhere = self.alone.desk, self._of_other_stages()
        if elsewhere or desk.is_waiting:
            self.mailbox.clear()
            verdict = self.alone.judge(desk.take(), elsewhere)
            # A stage without the slots of a verdict would drop nothing. Withheld slots would be missing on one stage.
            common = replace(verdict, slots=frozenset(), bad_memory=())
            self._mark = StageMark(common, verdict != Verdict())

    def _of_other_stages(self) -> tuple[Damage, ...]:
        found: Iterable[Damage] = self.mailbox.read() if self.mailbox.has_any else ()
        return tuple(found)
