"""Ends requests that have read damage, in the ways of SGLang. The client gets an error instead of a wrong answer."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

__all__ = ["STATUS", "end_running", "message", "reason_of_waiting"]

STATUS = HTTPStatus.INTERNAL_SERVER_ERROR
_TYPE = "InternalServerError"


def end_running(request: Any, what: str) -> bool:
    """End `request` when its forward in flight has a result. It leaves nothing in the prefix cache.

    Returns whether its answer had not gone out yet.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    request.to_finish = FINISH_ABORT(message(what), STATUS, _TYPE)
    request.skip_radix_cache_insert = True
    return True


def reason_of_waiting(what: str) -> dict[str, Any]:
    """The finish reason of a request that ends while it waits."""
    return {"type": "abort", "status_code": STATUS, "message": message(what)}


def message(what: str) -> str:
    return f"kv-canary: {what}"
