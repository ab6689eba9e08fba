"""On a prefill server: the last part of a request's KV goes when it is known what its forwards have found.

SGLang sends it as soon as the prefill has a result. Then nothing can be taken back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..context import context
from ..guard import attempt_aside
from ..releases import release
from .bell import Bell

__all__ = ["HeldSends"]

logger = logging.getLogger(__name__)

ROUNDS_OF_BELL = 2  # of the scheduler's loop, in which a finding of another rank gets here once it is known there
AT_MOST_S = 5.0  # after an internal error, what is waited for may never come
AT_LEAST_ROUNDS = 10  # in which the answer may come: one round may take longer than that
SAY_EVERY_S = 60.0


@dataclass(slots=True)
class _Held:
    request: Any
    number: int  # all ranks number requests alike
    since: float
    since_round: int
    is_known_here: bool = False
    known_in: int | None = None  # the round in which all findings about it were known, on all ranks


@dataclass(slots=True)
class HeldSends:
    """One per scheduler. Used from its thread. `bell`: of several tensor-parallel ranks.

    A rank of an MLA model may send nothing, and still find damage. So each rank waits for all.
    """

    bell: Bell | None
    send: Callable[[Any], None]  # the last part of a request's KV, as SGLang does
    given_up: int = 0  # requests whose KV went before their findings were known
    _say_again: float = 0.0
    _at_once: Any | None = None
    _round: int = 0
    _numbered: int = 0
    _held: dict[int, _Held] = field(default_factory=dict)  # id(request) -> it

    def must_wait(self, request: Any) -> bool:
        """Whether the last part of the KV of `request` must not go yet. If so, `go_on` sends it later."""
        if request is self._at_once:
            return False
        now = time.monotonic()
        held = self._held.pop(id(request), None) or self._new(request, now)
        if not self._is_open(held):
            return False
        rounds = self._round - held.since_round
        if now - held.since < AT_MOST_S or rounds < AT_LEAST_ROUNDS:
            self._held[id(request)] = held
            return True
        self._say_given_up(now)
        return False

    def _new(self, request: Any, now: float) -> _Held:
        self._numbered += 1
        return _Held(request, self._numbered, now, self._round)

    def _say_given_up(self, now: float) -> None:
        self.given_up += 1
        if now >= self._say_again:
            self._say_again = now + SAY_EVERY_S
            logger.warning(
                "kv-canary: the KV of a request was sent before all findings about it were known, after %.0f s "
                "(requests so far: %d). If it is damaged, its answer is wrong",
                AT_MOST_S,
                self.given_up,
            )

    def send_at_once(self, request: Any) -> None:
        """If the last part of its KV waits: another rank has failed the transfer, and the peer waits for all parts."""
        if self._held.pop(id(request), None) is not None:
            self._send_now(request)

    def _send_now(self, request: Any) -> None:
        self._at_once = request
        try:
            self.send(request)
        finally:
            self._at_once = None

    def begin_round(self) -> None:
        """The requests of a step have arrived, and findings of other ranks with them."""
        self._round += 1

    def go_on(self) -> None:
        """Send what may go now. Errors of SGLang's own end the server, as they do without a canary."""
        for key, held in tuple(self._held.items()):
            if release().row_of(held.request) is None:  # SGLang has ended it
                del self._held[key]
            elif not attempt_aside(self.must_wait, held.request):
                self._held.pop(key, None)
                self._send_now(held.request)

    def _say_known(self, held: _Held) -> None:
        if self.bell is not None:
            self.bell.say_known(held.number)

    def _is_open(self, held: _Held) -> bool:
        """Whether a finding about the request may come, or waits to be acted on."""
        manager = context.target
        if not manager.armed:
            self._say_known(held)  # nothing more is found here: nobody waits for it
            return False
        if not held.is_known_here:
            manager.drain()
            last = manager.recorder.last_of(held.request.rid)
            if last is not None and not manager.has_handed_over(last[0].forward):
                if not manager.publishes:
                    manager.copy_what_is_owed()
                return True
            held.is_known_here = True
        if self.bell is None:
            return manager.damage.is_waiting
        if held.known_in is None:
            self._say_known(held)
            if self.bell.known_everywhere() < held.number:
                return True
            held.known_in = self._round
        return manager.damage.is_waiting or self._round < held.known_in + ROUNDS_OF_BELL
