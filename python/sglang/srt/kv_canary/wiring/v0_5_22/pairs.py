"""SGLANG_KV_CANARY_ACTION=abort on servers of prefill-decode disaggregation, as these releases fail transfers.

A decode server keeps the slots of a failed transfer until each prefill rank has said that it writes no more. So no rank
waits for another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..containment.abort import end_running, message
from ..containment.pairs import (
    fail_naming,
    for_decode_server,
    for_prefill_server,
    poll_failing,
)
from ..containment.terms import Terms
from ..context import context
from ..disaggregation import COPY
from ..record_sender import wrap_method
from ..releases import release

__all__ = ["fail_damaged", "for_server_of", "status_now"]


def for_server_of(scheduler: Any, terms: Terms) -> Terms:
    """`terms` of a plain server, for the kind of server that `scheduler` is."""
    mode = scheduler.server_args.disaggregation_mode
    context.is_of_pair = mode != "null"
    if mode == "prefill":
        prefill = for_prefill_server(terms, _fail_sending)
        return replace(prefill, retracted=_none_of_them, begin_again=_yielded)
    if mode != "decode":
        return terms
    decode = for_decode_server(terms, _forget_copy, _leaving)
    end_waiting = functools.partial(_end_waiting, decode.end_waiting)
    return replace(decode, retracted=_retracted, end_waiting=end_waiting, promised=_promised)


def status_now(poll: Callable[[], int]) -> int:
    """The status of a failed transfer, whose slots SGLang frees once nothing is written to them."""
    return poll()


def _none_of_them(_: Any) -> list[Any]:
    return []


def _yielded(scheduler: Any) -> list[Any]:
    """Optimistic prefills that have given their slots to others, and wait for their next attempt."""
    bootstrap = scheduler.disagg_prefill_bootstrap_queue.queue
    return [request for request in (*scheduler.waiting_queue, *bootstrap) if request.is_retracted]


def _retracted(scheduler: Any) -> list[Any]:
    """Those whose KV is in host memory, and those whose KV the prefill server computes again."""
    queue = scheduler.disagg_decode_prealloc_queue
    again = [waiting.req for waiting in queue.queue if waiting.is_rebootstrap]
    return [*queue.retracted_queue, *queue.held_rebootstrap_reqs, *again]


def _end_waiting(
    original: Callable[[Any, Any, str], None], scheduler: Any, request: Any, why: str
) -> None:
    retracted = scheduler.disagg_decode_prealloc_queue.retracted_queue
    if request in retracted:
        retracted.remove(request)
        original(scheduler, request, why)
    else:
        end_running(request, why)  # when SGLang would go on to decode it


def _leaving(scheduler: Any) -> list[Any]:
    """Requests that have ended, and whose slots may still be written to."""
    return [entry[0].req for entry in scheduler.disagg_decode_transfer_queue._deferred_releases]


def _promised(scheduler: Any) -> Iterator[tuple[Any, int]]:
    """Prefixes in host memory of which the prefill server knows. They come into rows when all else has arrived."""
    for waiting in scheduler.disagg_decode_transfer_queue.queue:
        match = waiting.prefix_match
        if match is not None and match.needs_local_restore:
            yield waiting.req, match.decode_prefix_len


def _forget_copy(scheduler: Any, request: Any) -> None:
    from sglang.srt.mem_cache.common import discard_kv_cache_backup
    from sglang.srt.runtime_context import get_disagg

    backend = get_disagg().disaggregation_decode_retraction_backup
    discard_kv_cache_backup(request, scheduler.tree_cache, backend)
    request.__dict__.pop(COPY, None)


def _fail_sending(request: Any, why: str) -> bool:
    """Fail the transfer of `request` at its end. Returns whether its last part had not gone yet.

    If it had, another rank may still fail it. Then the error says why.
    """
    sender = request.disagg_kv_sender
    fail_naming(sender, message(why))
    request.skip_radix_cache_insert = True
    # A rank that sends nothing has succeeded at once. It must not fail before another one has told the decode server.
    if release().transfers.is_fake(request, None):
        sender.poll = functools.partial(poll_failing, sender.poll)  # nobody else would fail it
    return context.sent_chunks.fail(request.bootstrap_room, request.rid, why)


def fail_damaged(kv_manager: Any) -> None:
    """Let `kv_manager`, of a prefill rank, end the transfer of a request that has read damage as failed.

    SGLang tells the decode ranks. Over NIXL it says why; over Mooncake, a notice of ours has said it.
    """
    wrap_method(kv_manager, "conclude_transfer", _conclude)


def _conclude(original: Callable[..., Any], **what: Any) -> Any:
    from sglang.srt.disaggregation.base import KVPoll

    has_gone = what["status"] == KVPoll.Success
    if has_gone and (why := context.sent_chunks.let_go(what["bootstrap_room"])):
        what |= {"status": KVPoll.Failed, "failure_reason": message(why)}
    return original(**what)
