"""SGLANG_KV_CANARY_ACTION=abort on the servers of prefill-decode disaggregation: what differs from a plain server.

A prefill server ends a request by the failure of its transfer. All that it has queued is sent first, so that nothing is
written later. The notice that goes with the last part tells the decode server not to use it. A decode server ends a
request that is being received, or waits, when SGLang would begin to decode it: its transfer is over then, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..context import context
from .abort import message
from .terms import Terms

WAIT_AT_MOST_S = 1.0  # for this rank's part of a transfer that another rank has failed
_POLL_S = 0.001

__all__ = ["await_end", "fail_naming", "for_decode_server", "for_prefill_server", "raise_naming"]


def for_prefill_server(terms: Terms) -> Terms:
    """`terms` of a plain server, for one that prefills only."""

    def requests_of(scheduler: Any) -> Iterator[Any]:
        yield from terms.requests_of(scheduler)
        yield from scheduler.disagg_prefill_inflight_queue

    return replace(
        terms,
        requests_of=requests_of,
        end_running=_fail_sending,
        is_answered=_has_gone,
        has_ended=_always,  # nothing is retracted
        heeds_aborts=False,
    )


def for_decode_server(terms: Terms, forget_copy: Callable[[Any, Any], None]) -> Terms:
    """`terms` of a plain server, for one that decodes only.

    `forget_copy`: (scheduler, request) drops what host memory has of a retracted request.
    """

    def requests_of(scheduler: Any) -> Iterator[Any]:
        yield from terms.requests_of(scheduler)
        yield from scheduler.waiting_queue
        yield from (waiting.req for waiting in scheduler.disagg_decode_transfer_queue.queue)

    def answer_waiting(scheduler: Any, request: Any, reason: dict[str, Any]) -> None:
        forget_copy(scheduler, request)
        terms.answer_waiting(scheduler, request, reason)

    return replace(
        terms, requests_of=requests_of, answer_waiting=answer_waiting, retracted=_retracted
    )


def _retracted(scheduler: Any) -> list[Any]:
    return scheduler.disagg_decode_prealloc_queue.retracted_queue


def _always(_: Any) -> bool:
    return True


def _has_gone(request: Any) -> bool:
    return context.sent_chunks.has_gone(request.bootstrap_room, request.rid)


def _fail_sending(request: Any, why: str) -> bool:
    """Fail the transfer of `request` at its end. Returns whether its last part had not gone yet.

    If it had, another rank may still fail it. Then the error says why.
    """
    sender = request.disagg_kv_sender
    raise_when_sent = functools.partial(
        _raise_when_sent, sender.failure_exception, sender.poll, request
    )
    sender.failure_exception = functools.partial(raise_naming, raise_when_sent, message(why))
    request.skip_radix_cache_insert = True
    if not context.sent_chunks.fail(request.bootstrap_room, request.rid, why):
        return False
    sender.poll = functools.partial(_poll_failing, sender.poll)
    return True


def _poll_failing(original: Callable[[], int]) -> int:
    from sglang.srt.disaggregation.base import KVPoll

    status = original()
    return KVPoll.Failed if status == KVPoll.Success else status


def _raise_when_sent(original: Callable[[], None], poll: Callable[[], int], request: Any) -> None:
    """SGLang frees the slots next. This rank may still read them for the transfer, which another rank has failed."""
    from sglang.srt.disaggregation.base import KVPoll

    if context.held_sends is not None:
        context.held_sends.send_at_once(request)
    await_end(poll)
    # NIXL leaves it at success. A request that uses the room again would take that for its own.
    sender = request.disagg_kv_sender
    sender.kv_mgr.update_status(request.bootstrap_room, KVPoll.Failed)
    original()


def await_end(poll: Callable[[], int]) -> int:
    """The status of a transfer when this rank's part is over. It is, soon: no other rank waits for long."""
    from sglang.srt.disaggregation.base import KVPoll

    until = time.monotonic() + WAIT_AT_MOST_S
    while (status := poll()) in (KVPoll.WaitingForInput, KVPoll.Transferring):
        if time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    return status


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
