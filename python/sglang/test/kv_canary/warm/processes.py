"""Starts warm processes, and the hosts that they are forked from."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import IO, ClassVar

from torch._inductor.runtime.cache_dir_utils import cache_dir

from sglang_kv_canary.testing.serving import CanaryServer

from . import host as protocol
from .host import FOLDERS, Order

__all__ = ["FreshServer", "WarmProcess", "WarmProcesses", "shared"]

# Read by libraries that are no Python, so that nobody sees when.
READ_BY_LIBRARIES = (
    "PYTHON",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "LD_",
    "MALLOC_",
    "TRITON_",
    "TORCH_",
)
POLL_S = 0.01
# Without a GPU kernels run interpreted or not at all, and nothing but `--enable-torch-compile` needs a compiler. So all
# processes have it, and come from one host. The fill-in for that flag turns the compiler on again.
INTERPRETED = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}


def _for_libraries(env: Mapping[str, str]) -> dict[str, str]:
    names = (n for n in env if n.startswith(READ_BY_LIBRARIES) and n != "PYTHONPATH")
    return {name: env[name] for name in names}


class FreshServer(CanaryServer):
    """Its processes are launched as SGLang does it, whatever other servers' are."""

    popen: ClassVar = subprocess.Popen


class WarmProcess:
    """A child of this process, with what the tests need of `subprocess.Popen`."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                done, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it; Popen says 0, too
                done, status = self.pid, 0
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(POLL_S)
        return code


class _Host:
    """One host process, with the values of the variables that its imports have read."""

    def __init__(
        self,
        env: Mapping[str, str],
        connection: socket.socket,
        process: subprocess.Popen | WarmProcess,
    ) -> None:
        self._process, self._connection, self._env = process, connection, dict(env)
        said = protocol.hello(connection)
        self.can_fork = bool(said)
        self._read: dict[str, str | None] = said.get("read", {})
        self._changed: dict[str, str] = said.get("changed", {})
        self._parsed: list[str] = said.get("parsed", [])

    @classmethod
    def start(cls, env: Mapping[str, str]) -> _Host:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-W", "ignore", protocol.__file__, str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=env,
                pass_fds=[theirs.fileno()],
            )
        return cls(env, ours, process)

    @classmethod
    def own(cls) -> _Host | None:
        """The one that this process was forked with, see `workers.py`."""
        found = getattr(sys.modules["__main__"], "OWN_HOST", None)
        if found is None:
            return None
        connection, pid = found
        return cls({**INTERPRETED, **os.environ}, connection, WarmProcess(pid, []))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether a fresh process with `env` would import the same."""
        same_libraries = _for_libraries(env) == _for_libraries(self._env)
        now = {**self._changed, **env}
        return same_libraries and protocol.reads_the_same(self._read, now, self._parsed)

    def fork(self, order: Order, fds: Sequence[int]) -> WarmProcess:
        return WarmProcess(protocol.ask(self._connection, order, fds), order.argv)

    def close(self) -> None:
        self._connection.close()
        self._process.wait(60)  # it ends with the connection


class WarmProcesses:
    """The hosts of one process: one for each environment that imports tell apart. A context manager."""

    def __init__(self, host: _Host | None = None) -> None:
        self._hosts: list[_Host] = [] if host is None else [host]

    def __enter__(self) -> WarmProcesses:
        protocol.become_subreaper()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.close()

    def popen(
        self, args: Sequence[str], *, stdout: IO, stderr: IO, env: Mapping[str, str]
    ) -> WarmProcess | subprocess.Popen:
        """As subprocess.Popen of this interpreter with `-W ignore -m MODULE ...` or `-W ignore -c CODE ...`."""
        env = {**INTERPRETED, **env}
        host = self._host_for(env)
        if host is None:
            return subprocess.Popen(args, stdout=stdout, stderr=stderr, env=env)
        order = Order(_after_options(args), env, os.getcwd(), [1, 2])
        return host.fork(order, [stdout.fileno(), stderr.fileno()])

    def run_snippet(
        self,
        code: str,
        *argv: str,
        stdout: IO,
        stderr: IO,
        env: Mapping[str, str],
        for_imports: Mapping[str, str],
    ) -> WarmProcess | subprocess.Popen:
        """A process that runs `code`. Imports have read `for_imports` beside what they read here, and none of `env`.

        Where nothing can be forked, it is a fresh one, and what it imports has read `env`, too.
        """
        imported = {**INTERPRETED, **os.environ, **for_imports}
        host = self._host_for(imported)
        environment = {**imported, **env}
        if host is None:
            command = [sys.executable, "-W", "ignore", "-c", code, *argv]
            return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
        order = Order(["-c", code, *argv], environment, os.getcwd(), [1, 2], False)
        return host.fork(order, [stdout.fileno(), stderr.fileno()])

    def _host_for(self, env: Mapping[str, str]) -> _Host | None:
        """None where a process with `env` must be a fresh one."""
        for host in self._hosts:
            if host.alive and host.fits(env):
                return host if host.can_fork else None
        own = FOLDERS | {"PYTHONPATH"}
        ours = {name: os.environ[name] for name in own if name in os.environ}
        host = _Host.start({**{k: v for k, v in env.items() if k not in own}, **ours})
        self._hosts.append(host)
        return host if host.can_fork else None


def _after_options(args: Sequence[str]) -> list[str]:
    interpreter, *rest = args
    if interpreter != sys.executable or rest[:2] != ["-W", "ignore"] or rest[2] not in ("-m", "-c"):
        raise ValueError(f"not a command that can be forked: {args[:5]}")
    return rest[2:]


@cache
def shared() -> WarmProcesses:
    """Those of this process, until its end."""
    # Imports read it, and servers get it from the harness: all others have the same.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache_dir())
    warm = WarmProcesses(_Host.own())
    atexit.register(warm.__exit__)
    return warm.__enter__()
