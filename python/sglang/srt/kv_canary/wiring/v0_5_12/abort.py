"""Ends requests that have read damage, in the ways of SGLang. The client gets an error instead of a wrong answer."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

STATUS = HTTPStatus.INTERNAL_SERVER_ERROR
_TYPE = "InternalServerError"


def end_running(request: Any, what: str) -> None:
    """End `request` when its forward in flight has a result. It leaves nothing in the prefix cache."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    request.to_finish = FINISH_ABORT(_message(what), STATUS, _TYPE)
    request.skip_radix_cache_insert = True


def end_waiting(scheduler: Any, request: Any, what: str) -> None:
    """End `request`, which waits with no slots: it was retracted."""
    from sglang.srt.managers.io_struct import AbortReq

    scheduler.waiting_queue.remove(request)
    reason = {"type": "abort", "status_code": STATUS, "message": _message(what)}
    answer = AbortReq(finished_reason=reason, rid=request.rid)
    scheduler.send_to_tokenizer.send_output(answer, request)


def fail_transfer(receiver: Any, request: Any, what: str) -> None:
    """End `request`, whose KV has arrived and is not used yet. All ranks learn of it from SGLang's own poll."""
    from sglang.srt.disaggregation.base import KVPoll

    receiver.kv_mgr.record_failure(request.bootstrap_room, _message(what))
    receiver.kv_mgr.update_status(request.bootstrap_room, KVPoll.Failed)
    receiver.conclude_state = KVPoll.Failed


def _message(what: str) -> str:
    return f"kv-canary: {what}"
