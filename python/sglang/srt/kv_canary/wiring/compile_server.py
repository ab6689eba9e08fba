"""Compiles the kernels while SGLang starts: the main process runs a compile server until all schedulers are ready.

SGLANG_KV_CANARY_COMPILE_SERVER=0 turns it off. Nothing depends on it. Whatever goes wrong here, the scheduler processes
compile by themselves.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..compile_folder import FOLDER_ENV
from ..config import is_asked_for
from ..environ import COMPILE_SERVER, read_settings
from .context import context
from .hook_spec import HookSpec, HookType
from .releases import release

if TYPE_CHECKING:
    from ..kernels.triton.compile_requests import CompileServerProcess

logger = logging.getLogger(__name__)


def _before_launch(cls: type, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE Engine._launch_scheduler_processes."""
    os.environ.pop(FOLDER_ENV, None)
    context.compile_server = _attempt(_start, server_args)
    if context.compile_server is not None:
        os.environ[FOLDER_ENV] = str(context.compile_server.folder)


def _after_launch(result: Any, cls: type, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER Engine._launch_scheduler_processes, which does not wait for them."""
    os.environ.pop(FOLDER_ENV, None)
    server, context.compile_server = context.compile_server, None
    if server is None:
        return result
    launched = result[0]
    wait = launched.wait_for_ready

    def wait_for_ready() -> None:
        try:
            wait()
        finally:
            _attempt(_stop, server)

    launched.wait_for_ready = wait_for_ready
    _attempt(_request_what_will_be_needed, server, server_args)
    return result


def _start(server_args: Any) -> CompileServerProcess | None:
    """None where there is nothing to compile, or where it is off."""
    if not is_asked_for(server_args):
        return None
    args = release().settled(server_args)
    if not str(args.device).startswith("cuda"):
        return None
    from ..kernels.triton.compile_requests import CompileServerProcess
    from ..kernels.triton.direct_launch import warn_if_slow
    from ..kernels.triton.kernel_launcher import CAN_SKIP

    warn_if_slow()
    if not (CAN_SKIP and read_settings()[COMPILE_SERVER.config_field]):
        return None
    return CompileServerProcess(args.base_gpu_id)


def _request_what_will_be_needed(server: CompileServerProcess, server_args: Any) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    from ..kernels.triton.compile_requests import PREDICTED, CompileRequests
    from .predicted_variants import predicted_variants

    begin = time.monotonic()
    model_config = ModelConfig.from_server_args(server_args)
    settled = release().settled(server_args)
    variants = predicted_variants(settled, model_config, server.capability())
    if not variants:  # the scheduler processes ask for all
        return
    CompileRequests(server.folder).ask(variants, PREDICTED)
    logger.info(
        "kv-canary: compiles %d variants of its kernels beside the start (listed in %.1f s)",
        len(variants),
        time.monotonic() - begin,
    )


def _stop(server: CompileServerProcess) -> None:
    if server.has_ended:
        logger.warning("kv-canary: the compile server has ended by itself: %s", server.log())
    server.stop()


def _attempt(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        logger.warning(
            "kv-canary compiles its kernels later than it could: %s: %s",
            type(error).__name__,
            error,
        )
        return None


_LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"
_PROTECTS = "a fast start"
HOOKS = (
    HookSpec(_LAUNCH, _before_launch, HookType.BEFORE, _PROTECTS),
    HookSpec(_LAUNCH, _after_launch, HookType.AFTER, _PROTECTS),
)
