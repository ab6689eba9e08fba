"""The canary's flags as real fields of SGLang's `ServerArgs`.

The fields are added to the dataclass itself. This is the only way to reach the command line, `Engine(kv_canary=...)`,
`/server_info` and the copy in each scheduler process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

from ...config import CanaryConfig
from ...errors import CanaryConfigError, CanaryStartupError
from ..server_args import FIELDS, add_canary_args, check_request, end_command_line

__all__ = ["add_fields", "install_server_args", "is_ours"]

_OWNER = {"owner": "sglang-kv-canary"}


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
            end_command_line(error)

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


def _normalise(server_args: Any) -> None:
    """Refuse wrong values. Store plain values, which JSON and other processes can read."""
    config = CanaryConfig.from_server_args(server_args)
    server_args.kv_canary = config.mode.value
    server_args.kv_canary_real_data = config.content_mode.value
    server_args.kv_canary_sweep_interval = config.sweep_interval
