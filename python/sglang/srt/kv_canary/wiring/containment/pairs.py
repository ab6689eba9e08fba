"""SGLANG_KV_CANARY_ACTION=abort on the servers of prefill-decode disaggregation: what differs from a plain server.

A prefill server ends a request by the failure of its transfer. All that it has queued is sent first, so that nothing is
written later. The notice that goes with the last part tells the decode server why. A decode server ends a request that
is being received, or waits, when SGLang would begin to decode it: its transfer is over then, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..context import context
from .terms import Terms

__all__ = [
    "fail_naming",
    "for_decode_server",
    "for_prefill_server",
    "poll_failing",
    "raise_naming",
]


def for_prefill_server(terms: Terms, end_running: Callable[[Any, str], bool]) -> Terms:
    """`terms` of a plain server, for one that prefills only. `end_running`: see `Terms`."""

    def requests_of(scheduler: Any) -> Iterator[Any]:
        yield from terms.requests_of(scheduler)
        yield from scheduler.disagg_prefill_inflight_queue

    return replace(terms, requests_of=requests_of, end_running=end_running, is_answered=_has_gone)


def for_decode_server(
    terms: Terms,
    forget_copy: Callable[[Any, Any], None],
    leaving: Callable[[Any], Iterable[Any]] = lambda _: (),
) -> Terms:
    """`terms` of a plain server, for one that decodes only. `leaving`: see `Terms`.

    `forget_copy`: (scheduler, request) drops what host memory has of a retracted request.
    """

    def requests_of(scheduler: Any) -> Iterator[Any]:
        yield from terms.requests_of(scheduler)
        yield from scheduler.waiting_queue
        yield from (waiting.req for waiting in scheduler.disagg_decode_transfer_queue.queue)

    def end_waiting(scheduler: Any, request: Any, why: str) -> None:
        forget_copy(scheduler, request)
        terms.end_waiting(scheduler, request, why)

    return replace(
        terms,
        requests_of=requests_of,
        end_waiting=end_waiting,
        retracted=_retracted,
        leaving=leaving,
    )


def _retracted(scheduler: Any) -> list[Any]:
    return scheduler.disagg_decode_prealloc_queue.retracted_queue


def _has_gone(request: Any) -> bool:
    return context.sent_chunks.has_gone(request.bootstrap_room, request.rid)


def poll_failing(original: Callable[[], int]) -> int:
    """The status of a transfer that must not succeed."""
    from sglang.srt.disaggregation.base import KVPoll

    status = original()
    return KVPoll.Failed if status == KVPoll.Success else status


def fail_naming(party: Any, why: str) -> None:
    """Let SGLang's error of a failed transfer say `why`. `party`: its sender or receiver."""
    party.failure_exception = functools.partial(raise_naming, party.failure_exception, why)


def raise_naming(original: Callable[[], None], why: str) -> None:
    """That of NIXL, and of a rank that has not failed itself, does not say what was recorded."""
    try:
        original()
    except Exception as error:
        if why in str(error):
            raise
        raise RuntimeError(why) from error
