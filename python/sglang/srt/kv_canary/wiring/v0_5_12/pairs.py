"""SGLANG_KV_CANARY_ACTION=abort on servers of prefill-decode disaggregation, as this release fails transfers.

It frees the slots of a failed transfer at once, on all ranks. So a rank waits until its own part is over.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..containment.abort import message
from ..containment.hooks import ACTION
from ..containment.pair_hooks import INFLIGHT_QUEUE
from ..containment.pairs import (
    for_decode_server,
    for_prefill_server,
    poll_failing,
    raise_naming,
)
from ..containment.terms import Terms
from ..context import context
from ..disaggregation import COPY, DECODE
from ..hook_spec import HookSpec, HookType

# For this rank's parts of all transfers that another rank has failed in one look through a queue
WAIT_AT_MOST_S = 1.0  # shared by the transfers of one look through a queue
WAIT_AT_LEAST_S = 0.05  # for each: its own part is nearly over, whoever has used up the shared time
_POLL_S = 0.001

__all__ = ["HOOKS", "await_end", "for_server_of"]


def for_server_of(scheduler: Any, terms: Terms) -> Terms:
    """`terms` of a plain server, for the kind of server that `scheduler` is."""
    mode = scheduler.server_args.disaggregation_mode
    if mode == "prefill":
        # Nothing is retracted, and a request whose client has aborted it is sent all the same.
        return replace(
            for_prefill_server(terms, _fail_sending), has_ended=lambda _: True, heeds_aborts=False
        )
    return for_decode_server(terms, _forget_copy) if mode == "decode" else terms


def _forget_copy(_: Any, request: Any) -> None:
    request.__dict__.pop("kv_cache_cpu", None)
    request.__dict__.pop(COPY, None)


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
    sender.poll = functools.partial(poll_failing, sender.poll)
    return True


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
    """The status of a transfer when this rank's part is over. It is, soon: no other rank waits for long.

    Failed transfers that SGLang comes to in one look through its queue share the time.
    """
    from sglang.srt.disaggregation.base import KVPoll

    now = time.monotonic()
    if context.await_ends_until is None:
        context.await_ends_until = now + WAIT_AT_MOST_S
    until = max(now + WAIT_AT_LEAST_S, context.await_ends_until)
    while (status := poll()) in (KVPoll.WaitingForInput, KVPoll.Transferring):
        if time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    return status


def _before_queue(*_: Any, **__: Any) -> None:
    context.await_ends_until = None


HOOKS = tuple(
    HookSpec(target, _before_queue, HookType.BEFORE, ACTION)
    for target in (INFLIGHT_QUEUE, f"{DECODE}.DecodeTransferQueue.pop_transferred")
)
