"""Ends a request whose KV arrives damaged, in the way of SGLang."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..containment.abort import message

__all__ = ["fail_transfer"]


def fail_transfer(receiver: Any, request: Any, what: str) -> None:
    """End `request`, whose KV has arrived and is not used yet. All ranks learn of it from SGLang's own poll."""
    from sglang.srt.disaggregation.base import KVPoll

    receiver.kv_mgr.record_failure(request.bootstrap_room, message(what))
    receiver.kv_mgr.update_status(request.bootstrap_room, KVPoll.Failed)
    receiver.conclude_state = KVPoll.Failed
    receiver.failure_exception = functools.partial(
        _raise_naming, receiver.failure_exception, message(what)
    )


def _raise_naming(original: Callable[[], None], why: str) -> None:
    """SGLang's error of a failed transfer. That of NIXL does not say what was recorded."""
    try:
        original()
    except Exception as error:
        if why in str(error):
            raise
        raise RuntimeError(why) from error
