"""SGLang's streams: that of allocation and frees, on which the sweep lists and translates, and that of forwards."""

from __future__ import annotations

from typing import Any

from .context import context
from .guard import guarded
from .hook_spec import HookSpec, HookType


@guarded
def _before_event_loop(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    stream = getattr(scheduler, "schedule_stream", None)  # set just before; not on MLX
    for manager in context.managers:
        if stream is not None and not manager.identity.device.startswith("cpu"):
            manager.schedule_stream = stream
            context.forward_stream = getattr(scheduler, "forward_stream", None)


HOOKS = (
    HookSpec(
        "sglang.srt.managers.scheduler.dispatch_event_loop",
        _before_event_loop,
        HookType.BEFORE,
        "the sweep of SWA slots could raise false alarms",
    ),
)
