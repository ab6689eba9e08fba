"""SGLANG_KV_CANARY_ACTION=abort on servers of prefill-decode disaggregation, as these releases fail transfers.

A decode server keeps the slots of a failed transfer until each prefill rank has said that it writes no more. So no rank
waits for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..containment.abort import message
from ..containment.pairs import fail_naming, for_decode_server, for_prefill_server
from ..containment.terms import Terms
from ..context import context
from ..disaggregation import COPY
from ..record_sender import wrap_method

__all__ = ["fail_damaged", "for_server_of", "status_now"]


def for_server_of(scheduler: Any, terms: Terms) -> Terms:
    """`terms` of a plain server, for the kind of server that `scheduler` is."""
    mode = scheduler.server_args.disaggregation_mode
    context.is_of_pair = mode != "null"
    if mode == "prefill":
        return for_prefill_server(terms, _fail_sending)
    if mode != "decode":
        return terms
    return for_decode_server(terms, _forget_copy, _leaving)


def status_now(poll: Callable[[], int]) -> int:
    """The status of a failed transfer, whose slots SGLang frees once nothing is written to them."""
    return poll()


def _leaving(scheduler: Any) -> list[Any]:
    """Requests that have ended, and whose slots may still be written to."""
    return [entry[0].req for entry in scheduler.disagg_decode_transfer_queue._deferred_releases]


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
    fail_naming(request.disagg_kv_sender, message(why))
    request.skip_radix_cache_insert = True
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
