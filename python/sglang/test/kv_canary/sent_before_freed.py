"""Prefill servers that send a chunk before they free a slot of it. SGLang itself may free such a slot first.

With EAGLE the key of a token in the prefix cache needs the token that follows. So the last page of a chunk goes there
with the next chunk. If another request has cached an equal page by then, SGLang frees this one, whose KV may still wait
to be sent. That is reported as `USE_AFTER_FREE` on arrival. A slow machine makes it likely.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang_kv_canary.wiring.releases import release

__all__ = ["sent_before_freed"]

_PREFILL = "sglang.srt.disaggregation.prefill"
_CACHES = (
    f"{_PREFILL}.SchedulerDisaggregationPrefillMixin.checkpoint_disagg_prefill"
    if release().has_own_canary
    else f"{_PREFILL}.maybe_cache_unfinished_req"
)
_QUEUE = "sglang.srt.disaggregation.common.utils.FastQueue"
_LATEST_S = 5.0
_POLL_S = 0.0005
_QUEUED: list[Any] = []  # queues that chunks have been put into


def sent_before_freed() -> None:
    """A plugin for servers with EAGLE."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_QUEUE}.put", _count, HookType.BEFORE)
    HookRegistry.register(f"{_QUEUE}.get", _note_sent, HookType.AROUND)
    HookRegistry.register(_CACHES, _until_all_is_sent, HookType.BEFORE)


def _count(queue: Any, _: Any) -> None:
    """By the scheduler's thread alone."""
    queue.put_so_far = getattr(queue, "put_so_far", 0) + 1
    if queue not in _QUEUED:
        _QUEUED.append(queue)


def _note_sent(original: Callable[[Any], Any], queue: Any) -> Any:
    """The transfer's thread comes back when it has sent what it got."""
    queue.sent_so_far = getattr(queue, "sent_so_far", -1) + 1
    return original(queue)


def _until_all_is_sent(*_: Any, **__: Any) -> None:
    latest = time.monotonic() + _LATEST_S
    while any(q.put_so_far > getattr(q, "sent_so_far", 0) for q in _QUEUED):
        if time.monotonic() > latest:
            return
        time.sleep(_POLL_S)
