"""The end of a server: the scheduler processes name every waiting finding before they are killed.

SGLang's main process ends its scheduler processes with SIGKILL, however the server is stopped (SIGTERM, Ctrl-C,
`Engine.shutdown`). So it first leaves a note in a folder of its own. It waits a moment until every scheduler process
has answered, and only then kills.

A scheduler process also names its findings if it ends by an exception or Ctrl-C, or if it gets SIGTERM itself. Systemd
sends SIGTERM to every process of a service.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import is_asked_for
from .context import context
from .hook_spec import HookSpec, HookType

logger = logging.getLogger(__name__)

FOLDER_ENV = "_KV_CANARY_FAREWELL_FOLDER"
_NOTE = "the-server-ends"
WAIT_S = 3.0  # for the main process: a scheduler process answers between two steps
FINISH_S = 1.0  # for a scheduler process, to copy from the device
LOOK_EVERY_S = 0.25  # a look is a call of the system
TOUCH_EVERY_S = 3600.0  # services remove files in TMPDIR that nobody has touched for days


# In the main process


def _before_launch(engine: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    if not is_asked_for(server_args):
        return
    os.environ[FOLDER_ENV] = tempfile.mkdtemp(prefix="kv_canary_farewell_")
    context.farewell_folders.setdefault(os.getpid(), []).append(Path(os.environ[FOLDER_ENV]))


def _before_kill(parent_pid: int | None, *args: Any, **kwargs: Any) -> None:
    """Before SGLang's `kill_process_tree`. Its own process and None mean this process and its children."""
    if parent_pid not in (None, os.getpid()):
        return
    folders = context.farewell_folders.pop(os.getpid(), [])
    if not folders:
        return
    os.environ.pop(FOLDER_ENV, None)
    try:
        ask_for_farewell(folders, WAIT_S)
    except Exception as error:  # nothing here may stop the kill
        logger.error(
            "kv-canary cannot ask for findings that wait, so they are not named: %s", error
        )
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def ask_for_farewell(folders: Sequence[Path], wait_s: float) -> None:
    """Ask the scheduler processes in `folders` to name waiting findings. Wait until all have, at most `wait_s`.

    Who has not answered by then is logged.
    """
    asked = [folder for folder in folders if folder.is_dir()]
    for folder in asked:
        (folder / _NOTE).touch()
    deadline = time.monotonic() + wait_s
    while silent := [p.stem for f in asked for p in f.glob("*.pid") if _is_running(p)]:
        if time.monotonic() >= deadline:
            logger.warning(
                "kv-canary: no answer within %g s from the scheduler processes %s, so findings that wait there are not "
                "named. A scheduler in a long step does not answer",
                wait_s,
                ", ".join(sorted(silent)),
            )
            return
        time.sleep(0.005)


def _is_running(path: Path) -> bool:
    import psutil

    try:
        return psutil.Process(int(path.stem)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# In a scheduler process


def _touch(folder: Path) -> None:
    """The folder and what this process has in it: its mark, and the socket for live questions."""
    with suppress(OSError):  # the server ends, somebody has removed it, or nothing can be written
        for path in (folder, *folder.glob(f"{os.getpid()}.*")):
            os.utime(path)


class Farewell:
    """Names waiting findings when this process has to end. `attend` is called between steps and while idle."""

    def __init__(self, finish: Callable[[], None], folder: Path | None) -> None:
        self._finish = finish
        self._folder = folder
        self._mine = None if folder is None else folder / f"{os.getpid()}.pid"
        self._note = "" if folder is None else str(folder / _NOTE)
        self._next_look = 0.0
        self._next_touch = time.monotonic() + TOUCH_EVERY_S
        self._terminated = False
        self._saying = threading.Lock()
        if self._mine is not None and folder.is_dir():
            self._mine.touch()

    def attend(self) -> None:
        """Does nothing until the process has to end. Cheap: looks for the note once in LOOK_EVERY_S."""
        if self._terminated:
            self._die_of_sigterm()
        now = time.monotonic()
        if self._folder is None or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        if os.path.exists(self._note):  # faster than Path.exists
            self._folder = None
            self.say()
        elif now >= self._next_touch:
            self._next_touch = now + TOUCH_EVERY_S
            _touch(self._folder)

    def say(self) -> None:
        """Name waiting findings, and let the main process continue."""
        if not self._saying.acquire(blocking=False):
            return
        try:
            self._finish()
        finally:
            self._saying.release()
            if self._mine is not None:
                self._mine.unlink(missing_ok=True)

    def on_sigterm(self, *_: Any) -> None:
        """Runs between any two byte codes, so it only notes the signal. A process without further steps still ends."""
        if self._terminated:
            return
        self._terminated = True
        timer = threading.Timer(WAIT_S, self._die_of_sigterm)
        timer.daemon = True
        timer.start()

    def _die_of_sigterm(self) -> None:
        self.say()
        # Only the main thread can reset a signal handler; SIGKILL has none.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM if in_main else signal.SIGKILL)


def install_farewell() -> None:
    """In a scheduler process whose canary is active."""
    folder = os.environ.get(FOLDER_ENV)
    farewell = Farewell(_finish_managers, None if folder is None else Path(folder))
    context.attend_farewell = farewell.attend
    atexit.register(farewell.say)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, farewell.on_sigterm)


def _finish_managers() -> None:
    """Never raises: no caller is left to handle it."""
    for manager in context.managers:
        try:
            manager.finish(FINISH_S)
        except Exception as error:  # includes a violation in mode raise, whose text is the report
            logger.error("%s", error)


_PROTECTS = "findings that wait to be named when the server ends"
HOOKS = (
    HookSpec(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        _before_launch,
        HookType.BEFORE,
        _PROTECTS,
    ),
    HookSpec("sglang.srt.utils.common.kill_process_tree", _before_kill, HookType.BEFORE, _PROTECTS),
)
