"""Servers without `--kv-canary` do not pay for hooks: their schedulers get SGLang's own methods back.

The plugin has to register its hooks before it is known which servers of a process ask for the canary. A scheduler that
does not ask puts SGLang's methods back at the end of its start. `verify_hooks_applied()`, which runs in every server
that asks, puts the hooks back.
"""

from __future__ import annotations

import logging
from typing import Any

from ..config import is_asked_for
from .context import context
from .direct_hooks import below_hooks
from .hook_spec import HookSpec
from .registration import TakenOut

__all__ = ["take_hooks_out", "take_unused_hooks_out"]

logger = logging.getLogger(__name__)

# Of the start of a scheduler or of a main process
_STARTS = (
    "sglang.srt.entrypoints.",
    "sglang.srt.server_args.",
    "sglang.srt.managers.scheduler.Scheduler.__init__",
)


def take_unused_hooks_out(server_args: Any) -> list[str]:
    """Put SGLang's own methods back if no scheduler of this process has the canary. Returns their dotted names.

    What another plugin has hooked, too, stays as it is, and so do functions of modules. Never raises: a server without
    the canary must not end because of it.
    """
    if context.active or is_asked_for(server_args):
        return []
    try:
        return take_hooks_out()
    except Exception as error:
        logger.warning(
            "kv-canary is off, but some of its hooks stay in place: %s: %s",
            type(error).__name__,
            error,
        )
        return []


def take_hooks_out() -> list[str]:
    """The same, whether or not the canary is on. Raises what looking for a method raises."""
    by_target: dict[str, list[HookSpec]] = {}
    for hook in context.registration.hooks or ():
        if not hook.target.startswith(_STARTS):
            by_target.setdefault(hook.target, []).append(hook)
    taken = context.registration.taken_out
    for target, hooks in by_target.items():
        if target not in taken and (found := below_hooks(target, hooks)) is not None:
            taken[target] = TakenOut(found.owner, found.name, found.attribute, found.original)
            setattr(found.owner, found.name, found.original)
    return list(taken)
