"""Guards around the canary's work in hooks: in mode `log`, no error reaches SGLang while the server serves.

SGLang's own calls stay outside these guards, so its exceptions pass through unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .context import context

__all__ = [
    "attempt",
    "attempt_aside",
    "contain",
    "guarded",
    "guarded_aside",
    "taken_apart",
]

_GUARDS = "kv_canary_guards"  # of a guarded hook: its function, and whether its errors lose track

T = TypeVar("T")


def contain(error: Exception, function: Callable[..., Any], loses_track: bool = True) -> None:
    """Report `error`, raised by `function`. Raises it again if serving must not continue.

    `loses_track`: without the work of `function`, records or the knowledge about requests are out of date.
    """
    managers = context.managers
    if not managers or not managers[0].errors.contain(error, function):
        raise error
    if loses_track:
        managers[0].lose_track(error)  # the others follow at their next forwards


def attempt(function: Callable[..., T], *args: Any) -> T | None:
    """The result of `function`. None after an error with which serving continues, but checking stops."""
    try:
        return function(*args)
    except Exception as error:
        contain(error, function)
        return None


def attempt_aside(function: Callable[..., T], *args: Any) -> T | None:
    """The result of `function`. None after an error with which serving and checking continue."""
    try:
        return function(*args)
    except Exception as error:
        contain(error, function, loses_track=False)
        return None


def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Contain the errors of a BEFORE or AFTER hook. After an error SGLang continues as if there were no hook."""
    return _guarded(hook, loses_track=True)


def guarded_aside(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a hook whose failure leaves nothing out of date. Checking also continues."""
    return _guarded(hook, loses_track=False)


def _guarded(hook: Callable[..., Any], loses_track: bool) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            contain(error, hook, loses_track)
            return None

    setattr(run, _GUARDS, (hook, loses_track))
    return run


def taken_apart(
    hook: Callable[..., Any],
) -> tuple[Callable[..., Any], Callable[[Exception], None] | None]:
    """(what `hook` guards, what its guard does with an error of that). (`hook`, None) if it is not guarded."""
    guards = getattr(hook, _GUARDS, None)
    if guards is None:
        return hook, None
    function, loses_track = guards
    return function, lambda error: contain(error, function, loses_track)
