"""The canary's flags, and the checks of what is refused with them."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from typing import Any, NoReturn

from ..config import (
    FLAG_MODE,
    FLAG_REAL_DATA,
    FLAG_SWEEP_INTERVAL,
    CanaryConfig,
    CanaryMode,
    ContentMode,
    parse_interval,
)
from ..environ import given_names
from ..errors import GO_ON_WITHOUT, CanaryConfigError, CanaryStartupError
from .refusals import Refusal
from .releases import release
from .startup_check import verify_hooks_applied

__all__ = [
    "FIELDS",
    "add_canary_args",
    "check_request",
    "end_command_line",
    "refused_setups",
    "warn_of_settings_without_mode",
]

logger = logging.getLogger(__name__)

# Field name -> (type, default).
FIELDS: dict[str, tuple[type, Any]] = {
    "kv_canary": (str, CanaryMode.NONE.value),
    "kv_canary_real_data": (str, ContentMode.NONE.value),
    "kv_canary_sweep_interval": (int, 0),
}


def add_canary_args(parser: argparse.ArgumentParser) -> None:
    """The canary's flags, as SGLang's server and the settings table show them."""
    group = parser.add_argument_group("KV canary")
    group.add_argument(
        FLAG_MODE,
        type=str,
        default=FIELDS["kv_canary"][1],
        choices=[mode.value for mode in CanaryMode],
        help="Check on every forward that each KV slot holds what its reader expects. 'log' reports "
        "violations and keeps serving. 'raise' reports and ends the server.",
    )
    group.add_argument(
        FLAG_REAL_DATA,
        type=str,
        default=FIELDS["kv_canary_real_data"][1],
        choices=[mode.value for mode in ContentMode],
        help="Also fingerprint the K and V bytes of every layer. 'partial' samples each layer, "
        "'all' reads every byte.",
    )
    group.add_argument(
        FLAG_SWEEP_INTERVAL,
        type=_interval_argument,
        default=FIELDS["kv_canary_sweep_interval"][1],
        metavar="STEPS",
        help="Steps between checks of every slot that the prefix cache holds; 0 is off.",
    )


def _interval_argument(text: str) -> int:
    try:
        return parse_interval("value", text)
    except CanaryConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def refused_setups(server_args: Any) -> list[Refusal]:
    """Every reason why the canary cannot protect a server with these arguments."""
    settled = release().settled(server_args)
    return [case for case in release().refusals() if case.predicate(settled)]


@functools.cache
def warn_of_settings_without_mode() -> None:
    """People who set variables of the canary may believe that it is on. Said once in a process."""
    if given := given_names():
        verb = "is" if len(given) == 1 else "are"
        logger.warning(
            "kv-canary is off: nothing is checked, although %s %s set. To turn it on, add %s log",
            ", ".join(given),
            verb,
            FLAG_MODE,
        )


def check_request(server_args: Any) -> None:
    """Check the canary's settings and setup. Refuses nothing if the canary is off.

    Raises `CanaryConfigError` for wrong values, `CanaryStartupError` for a server that cannot be protected or lacks
    hooks.
    """
    config = CanaryConfig.from_server_args(server_args)
    if not config.enabled:
        warn_of_settings_without_mode()
        return
    if cases := refused_setups(server_args):
        reasons = "; ".join(f"{case.name}: {case.why} {case.how_to_go_on}" for case in cases)
        raise CanaryStartupError(
            f"kv-canary: {FLAG_MODE} {config.mode} cannot protect this server. {reasons} "
            f"{GO_ON_WITHOUT}"
        )
    verify_hooks_applied()


def end_command_line(error: CanaryConfigError | CanaryStartupError) -> NoReturn:
    """End the process with one line, as for any bad flag."""
    print(f"sglang: error: {error}", file=sys.stderr)
    sys.exit(2)
