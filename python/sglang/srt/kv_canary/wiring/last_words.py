"""RAISE mode: the violation is the last text on the main process's stderr before it kills its process tree.

A program that shuts its engine down has all answers by then, and would end as a success. So the shutdown raises.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import CanaryMode
from ..errors import CanaryHealthError, CanaryViolationError
from ..monitors.health import UNHEALTHY
from ..reports.violation_reporter import LAST_WORDS_ENV
from .context import context
from .hook_spec import HookSpec, HookType


def _before_launch(engine: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    if getattr(server_args, "kv_canary", None) != CanaryMode.RAISE:
        return
    handle, path = tempfile.mkstemp(prefix="kv_canary_last_words_", suffix=".txt")
    os.close(handle)
    os.environ[LAST_WORDS_ENV] = path
    context.last_words.setdefault(os.getpid(), []).append(Path(path))
    atexit.register(_note_exit)  # after Engine.shutdown was, so it is called before it


def _before_kill(parent_pid: int | None, *args: Any, **kwargs: Any) -> None:
    """Before SGLang's `kill_process_tree`. Its own process and None mean this process and its children."""
    if parent_pid not in (None, os.getpid()):
        return
    paths = context.last_words.pop(os.getpid(), [])
    if not paths:
        return
    os.environ.pop(LAST_WORDS_ENV, None)
    text = "".join(map(_taken, paths))
    if text:
        sys.stderr.write(f"\n{text}")
        sys.stderr.flush()
        context.said_at_the_end = text


def _taken(path: Path) -> str:
    """The words in `path`, which is removed."""
    text = ""
    with suppress(OSError):  # nothing here may stop the kill
        text = path.read_text(errors="replace")
        path.unlink()
    return text


def _note_exit() -> None:
    context.is_exiting = True


def _after_shutdown(_: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER Engine.shutdown, which has killed the scheduler processes. Raises what they had to say."""
    text, context.said_at_the_end = context.said_at_the_end, ""
    if not text:
        return
    if context.is_exiting:
        # The interpreter would print an error and end with code 0 all the same.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
    raise (CanaryHealthError if text.startswith(UNHEALTHY) else CanaryViolationError)(text)


HOOKS = (
    HookSpec(
        "sglang.srt.entrypoints.engine.Engine.shutdown",
        _after_shutdown,
        HookType.AFTER,
        "a program that ends before a violation of its last request is known",
    ),
    HookSpec(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        _before_launch,
        HookType.BEFORE,
        "the report of a violation that ends the server",
    ),
    HookSpec(
        "sglang.srt.utils.common.kill_process_tree",
        _before_kill,
        HookType.BEFORE,
        "the report of a violation that ends the server",
    ),
)
