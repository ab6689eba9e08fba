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
from .direct_hooks import below_hooks
from .registration import HookedMethod

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
    taken, failed = context.registration.taken_out, {}
    # Classes that inherit a hooked method before the class that has it: SGLang hooks them in their order.
    for target, hooks in sorted(context.registration.hooks_by_target().items(), reverse=True):
        if target in taken or target.startswith(_STARTS):
            continue
        try:
            if (found := below_hooks(target, hooks)) is not None:
                _take_out(found)
                taken[target] = found
        except (ImportError, AttributeError):  # not to be had here: SGLang could not hook it either
            continue
        except Exception as error:
            failed[target] = error
    if failed:
        target, error = next(iter(failed.items()))
        logger.warning(
            "kv-canary is off, but hooks of it stay (targets: %d), such as on %s: %s: %s",
            len(failed),
            target,
            type(error).__name__,
            error,
        )
    return list(taken)


def _take_out(method: HookedMethod) -> None:
    owner, name, original = method.owner, method.name, method.original
    bases = (vars(base) for base in owner.__mro__[1:])
    if next((base[name] for base in bases if name in base), None) is original:
        delattr(owner, name)  # SGLang's registry had put the wrapper of an inherited method there
    else:
        setattr(owner, name, original)
