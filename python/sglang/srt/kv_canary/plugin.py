"""The entry point that SGLang calls in every process: checks the release, adds the flags, registers the hooks.

Imports that need SGLang are inside `register()`. SGLang would swallow the error of an import that fails here, before
any of our code has run.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from .errors import GO_ON_WITHOUT
from .seam_guard import BUILTIN_ENV, wants_builtin
from .wiring.context import context
from .wiring.releases import release
from .wiring.version_check import check_sglang

__all__ = ["register"]

logger = logging.getLogger(__name__)


def register() -> None:
    """SGLang's entry point `sglang.srt.plugins: kv_canary`. Idempotent.

    SGLang swallows exceptions from here. They are recorded for `verify_hooks_applied()`. If the flags could not be
    added, `--kv-canary` would end in "unrecognized arguments". Then this ends the process with the real reason.
    """
    registration = context.registration
    if registration.started:
        return
    registration.started = True
    flags_exist = False
    try:
        check_sglang()
        if release().has_own_canary and wants_builtin():
            logger.warning("kv-canary: %s is set, so SGLang's own canary is in charge", BUILTIN_ENV)
            return
        _install_flags()
        flags_exist = True
        _register_hooks()
    except Exception as error:
        registration.failure = f"{type(error).__name__}: {error}"
        if not flags_exist and _asked_for(sys.argv[1:]):
            sys.exit(f"kv-canary: cannot start: {registration.failure} {GO_ON_WITHOUT}")
        raise


def _install_flags() -> None:
    from .environ import install_env_fields

    install_env_fields()
    release().install_flags()


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from .wiring import collect_hooks
    from .wiring.patch_scan import search_once

    known = collect_hooks()
    hooks = tuple(hook for hook in known if hook.is_needed)
    search_once()
    for hook in hooks:
        HookRegistry.register(hook.target, hook.fn, hook.hook_type)
    context.registration.hooks = hooks
    context.registration.left_out = tuple(hook for hook in known if hook not in hooks)
    context.install = _install_canary


def _install_canary(**arguments: Any) -> Any:
    """Imports the package's own modules only when a server asks for the canary."""
    from .api import install_canary

    return install_canary(**arguments)


def _asked_for(argv: list[str]) -> bool:
    """Whether the command line turns the canary on: `--kv-canary MODE` or `--kv-canary=MODE`."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=False):
        flag, equals, attached = argument.partition("=")
        if flag == "--kv-canary" and (attached if equals else following) != "none":
            return True
    return False
