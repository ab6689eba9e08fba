"""Test processes of pytest-xdist that are forked from one that has imported SGLang, each with a host of its own.

They would import it once each, and their hosts once more: 15 CPU seconds for each of both. What they are forked from
is `warm/host.py` of the rigs, run as a script here: as a module it would bring SGLang into the process with the
terminal.
"""

from __future__ import annotations

import atexit
import getpass
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

__all__ = ["install"]

# By its path: the rigs have several import names, and a look for one imports its parents.
HOST = Path(__file__).parents[1] / "python/sglang/test/kv_canary/warm/host.py"
# As in processes.py of the rigs. Imports read the first two, and servers get the third one from the harness.
FOR_IMPORTS = {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def install() -> None:
    """Test processes that pytest-xdist starts on this machine from now on are forked."""
    os.environ.setdefault(
        CACHE, str(Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"))
    )
    protocol = _load_protocol()
    protocol.become_subreaper()
    connection = _start(protocol)
    launch = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        if not spec.popen or spec.python or not connection:
            return launch(spec, execmodel)
        return _ForkedIO(protocol, connection, execmodel)

    gateway_io.create_io = create_io


def _load_protocol() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_warm_host", HOST)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _start(protocol: ModuleType) -> socket.socket | None:
    """None where it cannot fork."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = [protocol.__file__, str(theirs.fileno()), protocol.HAS_HOSTS]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **FOR_IMPORTS},
            pass_fds=[theirs.fileno()],
        )
    atexit.register(_end, ours, process)
    return ours if protocol.hello(ours) else None


def _end(connection: socket.socket, process: subprocess.Popen) -> None:
    connection.close()
    process.wait(60)  # it ends with the connection


class _ForkedIO(Popen2IO):
    """What execnet needs of a process that it talks to."""

    def __init__(self, protocol: ModuleType, connection: socket.socket, execmodel: Any) -> None:
        for_worker, to_worker = os.pipe()
        from_worker, for_answers = os.pipe()
        program = f"{BEGIN}{gateway_io.popen_bootstrapline}"
        order = protocol.Order(
            ["-c", program], dict(os.environ), os.getcwd(), [0, 1, 2], launches=False, has_host=True
        )
        self.pid = protocol.ask(connection, order, [for_worker, for_answers, 2])
        os.close(for_worker)
        os.close(for_answers)
        super().__init__(os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb"), execmodel)

    def wait(self) -> int | None:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


# Test processes compile, and hosts do not. Warnings are shown as in any test process.
BEGIN = """import sys, warnings
from torch._dynamo import config
config.disable = False
sys.warnoptions.clear()
warnings.resetwarnings()
"""
