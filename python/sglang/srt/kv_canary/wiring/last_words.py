"""RAISE mode: the violation is the last thing on the main process's stderr before it kills its tree."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..reports.violation_reporter import LAST_WORDS_ENV
from .hook_spec import HookSpec, HookType

_OWNER_ENV = "_KV_CANARY_LAST_WORDS_PID"


def _before_launch(engine: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    if getattr(server_args, "kv_canary", "none") != "raise":
        return
    handle, path = tempfile.mkstemp(prefix="kv_canary_last_words_", suffix=".txt")
    os.close(handle)
    os.environ[LAST_WORDS_ENV], os.environ[_OWNER_ENV] = path, str(os.getpid())


def _before_kill(*args: Any, **kwargs: Any) -> None:
    path = os.environ.get(LAST_WORDS_ENV)
    if path is None or os.environ.get(_OWNER_ENV) != str(os.getpid()) or not Path(path).exists():
        return
    text = ""
    with suppress(OSError):  # what kills the process must not be stopped here
        text = Path(path).read_text(errors="replace")
        Path(path).unlink()
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
