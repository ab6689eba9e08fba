"""Ends a request whose KV arrives damaged, in the way of SGLang."""

from __future__ import annotations

from typing import Any

from ..containment.abort import message
from ..containment.pairs import fail_naming

__all__ = ["fail_transfer"]


def fail_transfer(receiver: Any, request: Any, what: str) -> None:
    """End `request`, whose KV has arrived and is not used yet. All ranks learn of it from SGLang's own poll."""
    from sglang.srt.disaggregation.base import KVPoll

    receiver.kv_mgr.record_failure(request.bootstrap_room, message(what))
    receiver.kv_mgr.update_status(request.bootstrap_room, KVPoll.Failed)
    receiver.conclude_state = KVPoll.Failed
    fail_naming(receiver, message(what))
