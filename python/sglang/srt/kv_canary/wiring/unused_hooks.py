"""Servers without `--kv-canary` do not pay for hooks: their schedulers get SGLang's own methods back.

The plugin registers its hooks before it is known who asks for the canary. A scheduler that does not ask puts SGLang's
methods back at the end of its start. `verify_hooks_applied()` puts the hooks back. It runs before each scheduler that
asks is made.
"""

from __future__ import annotations

import logging
from typing import Any

from ..config import is_asked_for
from .context import context
from .direct_hooks import HookedMethod, below_hooks
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

    What another plugin has hooked, too, stays as it is. So do functions of modules. Never raises: this server has no
    canary.
    """
    return [] if context.active or is_asked_for(server_args) else take_hooks_out()


def take_hooks_out() -> list[str]:
    """The same, whether or not the canary is on."""
    by_target: dict[str, list[HookSpec]] = {}
    for hook in context.registration.hooks or ():
        if not hook.target.startswith(_STARTS):
            by_target.setdefault(hook.target, []).append(hook)
    taken, failed = context.registration.taken_out, {}
    # Classes that inherit a hooked method before the class that has it: SGLang hooks them in their order.
    for target, hooks in sorted(by_target.items(), reverse=True):
        if target in taken:
            continue
        try:
            if (found := below_hooks(target, hooks)) is not None:
                taken[target] = _taken_out(found)
        except (ImportError, AttributeError):  # not to be had here: SGLang could not hook it either
            continue
        except Exception as error:
            failed[target] = error
    if failed:
        target, error = next(iter(failed.items()))
        logger.warning(
            "kv-canary is off, and its hooks stay on %d methods, such as %s: %s: %s",
            len(failed),
            target,
            type(error).__name__,
            error,
        )
    return list(taken)


def _taken_out(found: HookedMethod) -> TakenOut:
    owner, name, original = found.owner, found.name, found.original
    bases = (vars(base) for base in owner.__mro__[1:])
    if next((base[name] for base in bases if name in base), None) is original:
        delattr(owner, name)  # SGLang's registry had put the wrapper of an inherited method there
    else:
        setattr(owner, name, original)
    return TakenOut(owner, name, found.attribute, original)
