"""The canary's flags as real fields of SGLang's `ServerArgs`, and the checks of what is refused with them.

The fields are added to the dataclass itself. This is the only way to reach the command line, `Engine(kv_canary=...)`,
`/server_info` and the copy in each scheduler process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from typing import Any

from ..config import (
    FLAG_MODE,
    FLAG_REAL_DATA,
    FLAG_SWEEP_INTERVAL,
    CanaryConfig,
    CanaryMode,
    ContentMode,
    parse_interval,
)
from ..errors import GO_ON_WITHOUT, CanaryConfigError, CanaryStartupError
from .refusals import REFUSALS
from .startup_check import verify_hooks_applied

__all__ = [
    "FIELDS",
    "add_canary_args",
    "add_fields",
    "check_request",
    "install_server_args",
    "is_ours",
]

_OWNER = {"owner": "sglang-kv-canary"}

# Field name -> (type, default).
FIELDS: dict[str, tuple[type, Any]] = {
    "kv_canary": (str, CanaryMode.NONE.value),
    "kv_canary_real_data": (str, ContentMode.NONE.value),
    "kv_canary_sweep_interval": (int, 0),
}


def is_ours(field: dataclasses.Field) -> bool:
    """Whether this project added the dataclass field."""
    return field.metadata.get("owner") == _OWNER["owner"]


def install_server_args() -> None:
    """Add the flags to `ServerArgs`: fields, command line and checks. Idempotent, all or nothing."""
    from sglang.srt.server_args import ServerArgs

    if all(name in ServerArgs.__dataclass_fields__ for name in FIELDS):
        return
    methods = _wrapped_methods(ServerArgs)
    add_fields(ServerArgs, FIELDS)
    for name, method in methods.items():
        setattr(ServerArgs, name, method)


def add_fields(cls: type, fields: dict[str, tuple[type, Any]]) -> None:
    """Append `fields` (name -> type, default) to the dataclass `cls` in place. Undone after an error."""
    before = dict(vars(cls))
    try:
        # dataclass() deletes class attributes of fields with a default_factory; the Field objects restore all.
        for field in cls.__dataclass_fields__.values():
            setattr(cls, field.name, field)
        for name, (_, default) in fields.items():
            setattr(cls, name, dataclasses.field(default=default, metadata=_OWNER))
        types = {name: field_type for name, (field_type, _) in fields.items()}
        cls.__annotations__ = {**cls.__annotations__, **types}
        for generated in ("__init__", "__repr__", "__eq__", "__match_args__"):
            delattr(cls, generated)  # dataclass() never overwrites an existing one
        dataclasses.dataclass(cls)
    except BaseException:
        _restore(cls, before)
        raise


def _restore(cls: type, before: dict[str, Any]) -> None:
    for name in set(vars(cls)) - set(before):
        delattr(cls, name)
    for name, value in before.items():
        if vars(cls).get(name) is not value:
            setattr(cls, name, value)


def _wrapped_methods(cls: type) -> dict[str, Any]:
    add_cli_args, post_init, check = cls.add_cli_args, cls.__post_init__, cls.check_server_args
    from_cli_args = cls.from_cli_args.__func__

    @functools.wraps(add_cli_args)
    def add_all_cli_args(parser: argparse.ArgumentParser) -> None:
        add_cli_args(parser)
        add_canary_args(parser)

    @functools.wraps(post_init)
    def checked_post_init(self: Any) -> None:
        # Before SGLang reads the model's config: wrong values fail without a model.
        _normalise(self)
        post_init(self)
        check_request(self)

    @functools.wraps(from_cli_args)
    def from_checked_cli_args(cls: type, args: argparse.Namespace) -> Any:
        """Ends the process, as for any bad flag. Code that builds ServerArgs in Python gets the exception."""
        try:
            return from_cli_args(cls, args)
        except (CanaryConfigError, CanaryStartupError) as error:
            print(f"sglang: error: {error}", file=sys.stderr)
            sys.exit(2)

    # Runs again just before the launch: fields can change after construction.
    @functools.wraps(check)
    def check_all_server_args(self: Any) -> None:
        check(self)
        check_request(self)

    return {
        "add_cli_args": staticmethod(add_all_cli_args),
        "__post_init__": checked_post_init,
        "from_cli_args": classmethod(from_checked_cli_args),
        "check_server_args": check_all_server_args,
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


def _normalise(server_args: Any) -> None:
    """Refuse wrong values. Store plain values, which JSON and other processes can read."""
    config = CanaryConfig.from_server_args(server_args)
    server_args.kv_canary = config.mode.value
    server_args.kv_canary_real_data = config.content_mode.value
    server_args.kv_canary_sweep_interval = config.sweep_interval


def check_request(server_args: Any) -> None:
    """Check the canary's settings and setup. Does nothing if the canary is off.

    Raises `CanaryConfigError` for wrong values, `CanaryStartupError` for a server that cannot be protected or lacks
    hooks.
    """
    config = CanaryConfig.from_server_args(server_args)
    if not config.enabled:
        return
    if cases := [case for case in REFUSALS if case.predicate(server_args)]:
        reasons = "; ".join(f"{case.name}: {case.why} {case.how_to_go_on}" for case in cases)
        raise CanaryStartupError(
            f"kv-canary: {FLAG_MODE} {config.mode} cannot protect this server. {reasons} "
            f"{GO_ON_WITHOUT}"
        )
    verify_hooks_applied()
