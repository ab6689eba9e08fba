"""Checks the request for a canary when SGLang checks its arguments. The flags are SGLang's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..hook_spec import HookSpec, HookType
from ..server_args import check_request


def _around_check(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND check_server_args, which the main process calls once all arguments are resolved."""
    returned = original(server_args, *args, **kwargs)
    check_request(server_args)
    return returned


HOOKS = (
    HookSpec(
        "sglang.srt.server_args.ServerArgs.check_server_args",
        _around_check,
        HookType.AROUND,
        "a server that the canary cannot protect",
    ),
)
