"""A process that compiles variants for the scheduler processes of a server, into Triton's cache on disk.

It runs beside SGLang's start and takes no GPU memory: Triton compiles for a named GPU without a driver. Each variant
gets a process of its own, forked from this one after all imports. It ends with its parent, or once its folder is gone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from .capability import capability_of

LOOK_EVERY_S = 0.02
LONGEST_S = 300.0  # for one variant; then it counts as failed
IDLE_S = 3600.0  # without a request; the main process may have lost it
NICENESS = 5  # SGLang's own start comes first
_PR_SET_PDEATHSIG = 1


class CompileServer:
    """Compiles what is requested in a folder, see `compile_requests`, in at most `processes` processes."""

    def __init__(self, folder: Path, processes: int, parent: int, lock: int, target: str) -> None:
        """`lock`: file descriptor whose lock says that this process lives. `target`: see `target_of`."""
        self._folder = folder
        self._processes = processes
        self._parent = parent
        self._lock = lock
        self._target = target
        self._known: set[str] = set()
        self._running: dict[int, tuple[str, float]] = {}  # pid -> (name, deadline)
        self._last_work = time.monotonic()

    def serve(self) -> None:
        """Until the parent or the folder is gone, or nothing is asked for a long time."""
        from .compile_requests import waiting_requests

        while self._is_wanted:
            self._reap()
            for request in waiting_requests(self._folder):
                if len(self._running) >= self._processes:
                    break
                if request.name not in self._known:
                    self._known.add(request.name)
                    self._start(request.name, request.path)
            time.sleep(LOOK_EVERY_S)

    @property
    def _is_wanted(self) -> bool:
        if self._running:
            self._last_work = time.monotonic()
        idle = time.monotonic() - self._last_work
        return os.getppid() == self._parent and self._folder.is_dir() and idle < IDLE_S

    def _start(self, name: str, path: Path) -> None:
        pid = os.fork()
        if pid:
            self._running[pid] = (name, time.monotonic() + LONGEST_S)
            return
        status = 1
        try:
            os.close(self._lock)
            _end_with_parent()
            self._answer(name, self._compile(path))
            status = 0
        except BaseException as error:
            self._answer(name, f"failed: {type(error).__name__}: {error}")
            status = 0  # it is answered; the parent would say less
        finally:
            os._exit(status)

    def _compile(self, path: Path) -> str:
        """The variant's hash in Triton's cache."""
        from .variant import Variant

        target = target_of(self._target)
        variant = Variant.from_text(path.read_text())
        compiled = variant.compile(target)
        try:
            variant.build_launcher(target, compiled)
        except Exception as error:  # the first launch does it again, and says what is wrong
            print(f"{variant.kernel}: no launcher: {error}", file=sys.stderr, flush=True)
        return compiled.hash

    def _answer(self, name: str, text: str) -> None:
        from .compile_requests import write_answer

        write_answer(self._folder, name, text)

    def _reap(self) -> None:
        now = time.monotonic()
        for pid, (name, deadline) in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._running[pid]
                if status and self._folder.is_dir():
                    self._answer(name, f"failed: its process ended with status {status}")
            elif now > deadline:
                os.kill(pid, signal.SIGKILL)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def target_of(text: str):
    """The GPUTarget of a compute capability such as "90"."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(text), 32)


def main(folder: str, processes: str, parent: str, lock: str, gpu: str, target: str) -> None:
    """`target` "": that of visible GPU number `gpu`."""
    os.nice(NICENESS)
    target = target or capability_of(int(gpu))
    # What every process would do for itself; the package's keys are known by now.
    from triton.runtime.cache import triton_key

    triton_key()
    server = CompileServer(Path(folder), int(processes), int(parent), int(lock), target)
    try:
        server.serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # its session: also compilers that its processes run


if __name__ == "__main__":
    main(*sys.argv[1:])
