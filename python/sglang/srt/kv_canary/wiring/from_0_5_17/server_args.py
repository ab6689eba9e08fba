"""Checks the request for a canary when SGLang reads a command line, and before it launches a server or an engine.

The flags are SGLang's own. A command line ends in one line. Programs get the exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...config import CanaryConfig
from ...errors import CanaryConfigError, CanaryStartupError
from ..context import context
from ..hook_spec import HookSpec, HookType
from ..server_args import check_request, end_command_line


def _around_from_cli_args(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ServerArgs.from_cli_args. Wrong values are refused before SGLang looks for a model."""
    try:
        server_args = original(*args, **kwargs)
        CanaryConfig.from_server_args(server_args)
    except CanaryConfigError as error:
        end_command_line(error)
    context.of_command_line = server_args
    return server_args


def _around_check(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND check_server_args, which the main process calls once all arguments are resolved."""
    returned = original(server_args, *args, **kwargs)
    try:
        check_request(server_args)
    except (CanaryConfigError, CanaryStartupError) as error:
        if server_args is not context.of_command_line:
            raise
        end_command_line(error)
    return returned


_ARGS = "sglang.srt.server_args.ServerArgs"
_PROTECTS = "a server that the canary cannot protect"

HOOKS = (
    HookSpec(f"{_ARGS}.from_cli_args", _around_from_cli_args, HookType.AROUND, _PROTECTS),
    HookSpec(f"{_ARGS}.check_server_args", _around_check, HookType.AROUND, _PROTECTS),
)
