"""RAISE mode: the violation is the last text on the main process's stderr before it kills its process tree."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import CanaryMode
from ..reports.violation_reporter import LAST_WORDS_ENV
from .context import context
from .hook_spec import HookSpec, HookType


def _before_launch(engine: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    if getattr(server_args, "kv_canary", None) != CanaryMode.RAISE:
        return
    handle, path = tempfile.mkstemp(prefix="kv_canary_last_words_", suffix=".txt")
    os.close(handle)
    os.environ[LAST_WORDS_ENV] = path
    context.last_words[os.getpid()] = Path(path)


def _before_kill(parent_pid: int | None, *args: Any, **kwargs: Any) -> None:
    """Before SGLang's `kill_process_tree`. Its own process and None mean this process and its children."""
    if parent_pid not in (None, os.getpid()):
        return
    path = context.last_words.pop(os.getpid(), None)
    if path is None:
        return
    os.environ.pop(LAST_WORDS_ENV, None)
    text = ""
    with suppress(OSError):  # nothing here may stop the kill
        text = path.read_text(errors="replace")
        path.unlink()
    if text:
        sys.stderr.write(f"\n{text}")
        sys.stderr.flush()


HOOKS = (
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
