"""Requests to the compile server: files in a folder, so that every scheduler process of the machine can ask.

`URGENCY-NUMBER-NAME.request` holds a variant's text. `NAME.answer` holds its hash in Triton's cache, or why it failed.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import triton

from ...compile_folder import COMPILES_ENV
from .capability import capability_of

if TYPE_CHECKING:
    from .variant import Variant

NEEDED, PREDICTED = 0, 1  # urgencies
MOST_PROCESSES = 16
_ALIVE = "alive"
_CACHE = "cache"  # holds the path of Triton's cache
_LOOK_EVERY_S = 0.005
_CHECK_LIFE_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class _Request:
    name: str
    path: Path


def waiting_requests(folder: Path) -> list[_Request]:
    """All requests, the most urgent one first. Answered ones are among them."""
    paths = sorted(folder.glob("*.request"))
    return [_Request(path.stem.rpartition("-")[2], path) for path in paths]


def write_answer(folder: Path, name: str, text: str) -> None:
    _write(folder / f"{name}.answer", text)


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.rename(path)


class CompileRequests:
    """The asking side, in any process of the machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self.cache_dir = (folder / _CACHE).read_text()

    def ask(self, variants: Iterable[Variant], urgency: int) -> None:
        for variant in variants:
            path = self._folder / f"{urgency}-{next(self._numbers):05}-{variant.name}.request"
            _write(path, variant.text)

    def knows(self, variant: Variant) -> bool:
        """Whether anybody has asked for it."""
        return any(self._folder.glob(f"*-{variant.name}.request"))

    def answer(self, variant: Variant) -> str | None:
        """Waits for it. None: the server has ended without one."""
        path, alive, next_check = self._folder / f"{variant.name}.answer", True, 0.0
        while True:
            # In this order: an answer may come between the two.
            if time.monotonic() >= next_check:
                alive = self.is_served
                next_check = time.monotonic() + _CHECK_LIFE_EVERY_S
            try:
                return path.read_text()
            except OSError:
                pass
            if not alive:
                return None
            time.sleep(_LOOK_EVERY_S)

    @property
    def is_served(self) -> bool:
        """Whether the server lives: it holds a lock as long."""
        try:
            with open(self._folder / _ALIVE) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


class CompileServerProcess:
    """The compile server as a child of this process."""

    def __init__(self, gpu: int = 0, target: str = "", processes: int | None = None) -> None:
        """`target`: compute capability such as "90"; "": that of visible GPU number `gpu`. Raises OSError."""
        self._gpu, self._target = gpu, target
        self._folder = tempfile.TemporaryDirectory(prefix="kv_canary_compile_")
        self.folder = Path(self._folder.name)
        (self.folder / _CACHE).write_text(triton.knobs.cache.dir)
        if processes is None:
            processes = most_processes()
        package = __package__ or ""
        environment = {
            **os.environ,
            COMPILES_ENV: "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder),  # what the compilers leave half-done goes with it
        }
        with (
            open(self.folder / _ALIVE, "w") as lock,
            open(self.folder / "log", "w") as log,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)  # it inherits the lock
            arguments = (self.folder, processes, os.getpid(), lock.fileno(), gpu, target)
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{package}.compile_server", *map(str, arguments)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def capability(self) -> int:
        """Compute capability of the GPU that it compiles for, such as 90. Asks the driver, in a process of its own.

        Raises RuntimeError without a GPU.
        """
        return int(self._target or capability_of(self._gpu))

    @property
    def has_ended(self) -> bool:
        """By itself, before `stop`."""
        return self._process.poll() is not None

    def log(self) -> str:
        """What it has printed."""
        return (self.folder / "log").read_text()

    def stop(self) -> None:
        """End it, with all that it runs. What is finished stays in Triton's cache."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()


def most_processes() -> int:
    """A quarter of the cores is left to SGLang's start."""
    return max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) * 3 // 4))
