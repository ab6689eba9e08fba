"""SWA slots that the prefix cache gives to other full slots, by their mapping. Forwards in flight look them up there.

The cache keeps full slots that a request holds and whose SWA slots are gone. Another request with the same tokens
brings SWA slots of its own. The cache maps the kept full slots to these, and unmaps that request's. SGLang does so
beside a forward that has translated its slots, as decode graphs do first. TAIL and content translate after the layers,
and would write no record. So the move waits for the forwards that were launched before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..forward_stream import await_forwards
from ..guard import guarded
from ..hook_spec import HookSpec, HookType

__all__ = ["before_action", "before_move", "move_hooks"]

_MOVES = "RecoverSWAWithLockedFull"  # one of many actions of a component, until 0.5.21 the only one that moves
_EARLY = "SWA slots that change hands under a forward would be false alarms"


@guarded
def before_move(*_: Any, **__: Any) -> None:
    await_forwards()


@guarded
def before_action(component: Any, action: Any, *_: Any) -> None:
    if type(action).__name__ == _MOVES:
        before_move()


def move_hooks(targets: dict[str, Callable[..., None]]) -> tuple[HookSpec, ...]:
    """`targets`: what moves mappings, and the hook before it."""
    return tuple(HookSpec(name, hook, HookType.BEFORE, _EARLY) for name, hook in targets.items())
