"""The methods that update weights."""

from __future__ import annotations

from ..from_0_5_17.weights import SCHEDULER, SESSION_HOOKS, update_hooks
from ..hook_spec import HookSpec
from ..released_memory import release_hooks


def _session_hooks() -> tuple[HookSpec, ...]:
    """0.5.22 has no sessions of updates."""
    from sglang.srt.managers import io_struct

    return SESSION_HOOKS if hasattr(io_struct, "EndWeightUpdateReqInput") else ()


HOOKS = (
    *update_hooks("load_weights_from_distributed"),
    *_session_hooks(),
    *release_hooks(SCHEDULER),
)
