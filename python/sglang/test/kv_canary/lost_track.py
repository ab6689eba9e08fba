"""A prefill server whose canary stops checking while it serves."""

from __future__ import annotations

from typing import Any

__all__ = ["LOST", "prefill_loses_track"]

LOST = "lost"  # a request
_ARRIVES = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add"


def prefill_loses_track() -> None:
    """A plugin: when a request named LOST comes, the canary there loses track, as after an internal error."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_ARRIVES, _lose_track, HookType.BEFORE)


def _lose_track(_: Any, request: Any, *__: Any, **___: Any) -> None:
    from sglang_kv_canary.wiring.context import context

    if request.rid == LOST:
        context.target.lose_track()
