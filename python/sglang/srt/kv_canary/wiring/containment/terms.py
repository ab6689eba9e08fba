"""What a release of SGLang calls the things that a containment needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .abort import end_running

__all__ = ["Terms"]


def _waiting_queue(scheduler: Any) -> list[Any]:
    return scheduler.waiting_queue


def _is_finished(request: Any) -> bool:
    return request.finished()


def _nobody(_: Any) -> tuple[Any, ...]:
    return ()


def _never(_: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one family of releases, and of one kind of server."""

    length_of: Callable[[Any], int]  # slots in a request's row
    # Of a scheduler: all requests that hold slots, and the one whose prompt is prefilled in chunks. May have a request
    # twice, None, or one without slots.
    requests_of: Callable[[Any], Iterable[Any]]
    # (scheduler, request, why): end one that waits with no slots, and has left its queue
    end_waiting: Callable[[Any, Any, str], None]
    # (request, why): end one that holds slots. Returns whether its answer had not gone out yet.
    end_running: Callable[[Any, str], bool] = end_running
    # Of a scheduler: a list with the requests that wait after a retraction, among others
    retracted: Callable[[Any], list[Any]] = _waiting_queue
    # Of a scheduler: requests that will be computed again from the start. Nothing of what they have read is left.
    begin_again: Callable[[Any], Iterable[Any]] = _nobody
    # Of a scheduler: (request, length) of those that will get a cached prefix of that length, which no row has yet
    promised: Callable[[Any], Iterable[tuple[Any, int]]] = _nobody
    # Whether the answer of a request that holds slots has gone out
    is_answered: Callable[[Any], bool] = _never
    # Whether SGLang ends a running request that its client has aborted. A prefill server sends its KV all the same.
    heeds_aborts: bool = True
    # Whether a request that gives its row back has ended. Otherwise it was retracted.
    has_ended: Callable[[Any], bool] = _is_finished
    # Of a scheduler: requests that have ended, and keep their slots until nothing is written to them any more
    leaving: Callable[[Any], Iterable[Any]] = _nobody
