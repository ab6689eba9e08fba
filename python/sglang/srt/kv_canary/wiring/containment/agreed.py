"""SGLANG_KV_CANARY_ACTION=abort on several tensor-parallel ranks: all of them act in the same step, and alike.

A rank that finds damage rings a bell, which all ranks hear between the same two steps. Each then says what it has
found, each works out what that means for its own slots, and all do what any of them asks for. Slots are compared by
number only while the page tables and prefix caches of all ranks are equal. Otherwise the whole cache is dropped.

SGLang's ranks must have the same number of free slots, or they schedule different batches and wait for each other
forever. So whatever may free more on one rank than on another happens while the bell is heard, and is evened out.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...runner.damage_desk import Damage, Reader
from ..guard import attempt_aside
from .bell import Bell
from .containment import UNJUDGED
from .parked_pages import ParkedPages
from .rank_group import RankGroup
from .verdict import Verdict

__all__ = ["AgreedContainment"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    """By one rank."""

    newest: int  # its last forward: forwards are counted by each rank
    readers: tuple[Reader, ...]
    anything: bool
    disturbed: bool  # slots of the rank may be lost, or free and in use at once


@dataclass(frozen=True, slots=True)
class _Opinion:
    """Of one rank, about what all have found."""

    newest: int
    verdict: Verdict
    layout: bytes | None  # digest of page tables and prefix cache; None: unknown


@dataclass(slots=True)
class AgreedContainment:
    """One per scheduler. `alone` is what a single rank would do. Used from the scheduler's thread."""

    alone: Any
    ranks: RankGroup
    bell: Bell
    parked: ParkedPages
    _deferred: list[torch.Tensor] = field(default_factory=list)  # slots to free at the next bell
    _settled_at: int = 0  # step after which the idle ranks have agreed that nothing is left to do
    _may_miss_slots: bool = False

    def __post_init__(self) -> None:
        self.alone.desk.on_found = self.bell.ring

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
        """Whether a leak may be damage that is not dealt with yet: the next bell repairs it."""
        return self._may_miss_slots or self.alone.owned.disturbed

    def receiving(self) -> AbstractContextManager[None]:
        return self.bell.receiving()

    def received(self, requests: list[Any]) -> list[Any]:
        return requests

    def between_steps(self) -> None:
        """The requests of a step have arrived, and perhaps a bell with them."""
        self._may_miss_slots = False
        if self.bell.heard():
            self._agree()
        elif not self.alone.owned.disturbed:
            self.alone.tidy()
        elif self.alone.prefixes.has_unheld():
            self.bell.ring()
        if self.alone.desk.is_waiting:
            self.bell.ring()

    def before_eviction(self) -> None:
        """Nothing: in the middle of a step the ranks cannot agree."""

    def note_finished(self, request: Any) -> None:
        self.alone.note_finished(request)

    def has_wrong_row(self, request: Any) -> bool:
        return self.alone.has_wrong_row(request)

    def releasing(self, request: Any) -> AbstractContextManager[None]:
        """Around the release of the request's slots. Rows that may be wrong differ between ranks."""
        if not self.alone.is_misled(request):
            return nullcontext()
        attempt_aside(self.alone.prefixes.pin, request)
        self.bell.ring()
        return self.alone.owned.deferring(self._deferred)

    def on_idle(self) -> None:
        """Before SGLang looks for leaks."""
        step = self.alone.manager.recorder.step_count
        if step != self._settled_at or self.alone.owned.disturbed:
            self._may_miss_slots = True
            self.bell.ring()

    def after_clear(self, allocator: Any) -> None:
        self.alone.withheld.after_clear(allocator)
        self.parked.after_clear(allocator)
        self._deferred.clear()

    # While the bell is heard. Each rank takes part in each `gather`, whatever fails on it.

    def _agree(self) -> None:
        alone = self.alone
        found, newest = alone.desk.take(), alone.manager.recorder.newest
        mine = _Found(newest, found.readers, found != Damage(), alone.owned.disturbed)
        everything = self.ranks.gather(mine)
        was_disturbed = any(part.disturbed for part in everything)
        has_damage = any(part.anything for part in everything)
        if has_damage:
            readers = tuple(_numbered(everything, newest))
            self._act(replace(found, readers=readers), newest)
        attempt_aside(self._free_deferred)
        attempt_aside(alone.tidy)
        if has_damage or was_disturbed:
            self._even_out()
        if alone.scheduler.is_fully_idle():
            if alone.owned.disturbed:
                attempt_aside(alone.start_afresh)
            self._settled_at = alone.manager.recorder.step_count

    def _act(self, found: Damage, newest: int) -> None:
        alone = self.alone
        verdict = attempt_aside(alone.opinion, found) or Verdict(is_whole=False)
        layout = attempt_aside(self._layout)
        opinions = self.ranks.gather(_Opinion(newest, verdict, layout))
        verdicts = [_renumbered(o.verdict, newest - o.newest) for o in opinions]
        whole = [verdict for verdict in verdicts if verdict.is_whole]
        together = Verdict.of_all(whole or verdicts)
        if (why := _why_everything(opinions)) is not None:
            # Slots of other ranks mean nothing here. At the latest when idle, all ranks begin afresh.
            together = replace(together, slots=frozenset(), bad_memory=(), disturbs=True)
            self._say(why)
        is_as_asked = attempt_aside(alone.carry_out, together, why is not None)
        if not all(self.ranks.gather(is_as_asked)):
            # A rank without the prefix of the others schedules other batches.
            self._say(
                "after an internal error on a tensor-parallel rank, all of them drop the whole cache"
            )
            attempt_aside(alone.drop_everything, together.computed)

    def _layout(self) -> bytes:
        """Equal on all ranks whose live requests and cached prefixes lie in the same slots."""
        digest = hashlib.blake2b(digest_size=16)
        for each in self.alone.layout():
            digest.update(each)
        return digest.digest()

    def _free_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        if deferred:
            self.alone.free_owned(torch.cat(deferred))

    def _even_out(self) -> None:
        """All ranks have as many free slots, and as many cached ones, and know of each other's disturbances."""
        said = self.ranks.gather((attempt_aside(self._sizes), self.alone.owned.disturbed))
        everywhere = [sizes for sizes, _ in said]
        self.alone.owned.disturbed = any(disturbed for _, disturbed in said)
        if all(everywhere):
            kinds = everywhere[0][0]
            least = {kind: min(free[kind] for free, _ in everywhere) for kind in kinds}
            attempt_aside(self.parked.leave_free, least)
        if not all(everywhere) or len({cached for _, cached in everywhere}) > 1:
            self.alone.owned.disturbed = True
            self._say(
                "the tensor-parallel ranks cache different numbers of tokens. They may schedule different batches: "
                "flush the cache"
            )

    def _sizes(self) -> tuple[dict[str, int], int]:
        """Free pages by pool kind, and cached tokens."""
        return self.parked.counts(), self.alone.prefixes.num_cached

    def _say(self, what: str) -> None:
        if self.ranks.rank == 0:
            logger.warning("kv-canary action: %s", what)


def _why_everything(opinions: list[_Opinion]) -> str | None:
    """Why the whole cache is dropped. None: the slots of each verdict are those of all ranks."""
    without = sum(not opinion.verdict.is_whole for opinion in opinions)
    if without == len(opinions):
        return UNJUDGED
    if without:
        return (
            f"after an internal error on {without} of {len(opinions)} tensor-parallel ranks, the verdict of the others "
            "holds, and the whole cache is dropped. Requests that hold bytes go on, if only a rank with the error has "
            "found them changed"
        )
    layouts = {opinion.layout for opinion in opinions}
    if None in layouts:
        return (
            "after an internal error, the slots of the tensor-parallel ranks cannot be compared: the whole cache is "
            "dropped"
        )
    if len(layouts) > 1:
        return "the tensor-parallel ranks differ in their slots: the whole cache is dropped"
    return None


def _numbered(parts: Iterable[_Found], newest: int) -> Iterable[Reader]:
    """The readers that all ranks have found, with forwards as this rank counts them."""
    for part in parts:
        for reader in part.readers:
            yield replace(reader, forward=reader.forward + newest - part.newest)


def _renumbered(verdict: Verdict, shift: int) -> Verdict:
    answered = {rid: forward + shift for rid, forward in verdict.answered.items()}
    return replace(verdict, answered=answered)
