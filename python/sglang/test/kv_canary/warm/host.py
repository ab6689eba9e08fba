"""A process that has imported SGLang, and forks a child for each order that comes over its socket.

A script of its own, because importing it as a module would import SGLang before the reads are watched. A child is
what a fresh interpreter is after its imports: own environment, arguments, folder and descriptors, the parent that
asked for it, and an end as of any interpreter. Processes that it launches by multiprocessing's `spawn` are forked
for it by a helper that was forked before it ran anything. Two things differ, see `savings.py`: what waits sleeps a
moment instead of taking a core, and SGLang finds in an index what it would look through all modules for.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any, ClassVar

import setproctitle

__all__ = ["HAS_HOSTS", "Order", "ask", "become_subreaper", "hello", "reads_the_same"]

IMPORTED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
)
# What every server imports later. Some releases lack some of them, and some need what is not installed.
IMPORTED_WHERE_THEY_ARE = (
    "openai_harmony",
    "sglang.srt.arg_groups.hisparse_hook",
    "sglang.srt.disaggregation.common.staging_handler",
    "sglang.srt.disaggregation.fake.conn",
    "sglang.srt.distributed.device_communicators.custom_all_reduce",
    "sglang.srt.distributed.device_communicators.hpu_communicator",
    "sglang.srt.distributed.device_communicators.npu_communicator",
    "sglang.srt.distributed.device_communicators.pymscclpp",
    "sglang.srt.distributed.device_communicators.pynccl",
    "sglang.srt.distributed.device_communicators.shm_broadcast",
    "sglang.srt.distributed.device_communicators.torch_symm_mem",
    "sglang.srt.distributed.device_communicators.xpu_communicator",
    "sglang.srt.dllm.algorithm",
    "sglang.srt.entrypoints.openai.serving_responses",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.mem_cache.hi_mamba_radix_cache",
    "sglang.srt.mem_cache.hiradix_cache",
    "sglang.srt.mem_cache.pool_host",
    "sglang.srt.mem_cache.unified_radix_cache",
    "sglang.srt.speculative.dflash_info",
    "sglang.srt.speculative.eagle_worker",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.speculative.ngram_info",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
)
# The canary's own modules, which a process with its plugin imports. None does anything at import.
OURS = "sglang_kv_canary"
OURS_LEFT_OUT = {"__main__", "analysis", "cli", "demo", "fault_table", "selftest"}
# Constants that SGLang reads from the environment at import. A child reads them again.
READ_AGAIN = {
    "SGLANG_TEST_RETRACT": ("sglang.srt.managers.scheduler", "TEST_RETRACT"),
    "SGLANG_TEST_RETRACT_INTERVAL": ("sglang.srt.managers.scheduler", "TEST_RETRACT_INTERVAL"),
    "SGLANG_TBO_DEBUG": ("sglang.srt.batch_overlap.two_batch_overlap", "_tbo_debug"),
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": (
        "sglang.srt.managers.tokenizer_manager",
        "_REQUEST_STATE_WAIT_TIMEOUT",
    ),
}
FOLDERS = {
    "TMPDIR",
    "TEMP",
    "TMP",
    "PWD",
    "OLDPWD",
}  # read once more by `_settle_in`, or by nobody that matters
# Read whenever plugins are loaded. Imports load those of platforms only, and there are none.
PLUGINS = {"SGLANG_PLUGINS"}
# Attention on GPUs sets up the compiler's log by it.
OF_GPUS = {"SGLANG_ENABLE_TORCH_COMPILE"}
MOST_BYTES, MOST_FDS = 1 << 20, 64
HAS_HOSTS = "--has-hosts"  # of a process that is no host itself: its children have hosts
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True, slots=True)
class Order:
    """What a child is to run. Its descriptors come with it, to become those of `fds`."""

    argv: list[str]  # of the interpreter, without its options: -m MODULE ..., or -c CODE ...
    env: dict[str, str]
    folder: str
    fds: list[int]
    launches: bool = True  # processes of its own, by `spawn`
    has_host: bool = False  # forked for it from this process, see `OWN_HOST`


# Both sides of the socket


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def become_subreaper() -> None:
    """What is forked for this process becomes its child as soon as the process between has ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def ask(connection: socket.socket, order: Order, fds: Sequence[int]) -> int:
    """The pid of a new child of this process that runs `order`, with `fds` as its `order.fds`."""
    socket.send_fds(connection, [json.dumps(asdict(order)).encode()], list(fds))
    answer = connection.recv(MOST_BYTES)
    if not answer:
        raise ChildProcessError("the host of warm processes has ended")
    return int(answer)


def hello(connection: socket.socket) -> dict[str, Any]:
    """The host's first word, see `_main`; nothing where it cannot fork."""
    answer = connection.recv(MOST_BYTES)
    return json.loads(answer) if answer else {}


# The variables that imports read


def reads_the_same(
    read: Mapping[str, str | None], env: Mapping[str, str], parsed: Collection[str] = ()
) -> bool:
    """Whether imports in a process with `env` would read `read`, or what is read again.

    Of the names in `parsed`, imports have seen only what SGLang makes of the value: unset may be as good as "0".
    """
    changed = (n for n, value in read.items() if env.get(n) != value and n not in READ_AGAIN)
    return all(n in parsed and _parse(n, read[n]) == _parse(n, env.get(n)) for n in changed)


def _parse(name: str, value: str | None) -> Any:
    """`value` as SGLang's declaration of `name` has it; itself where there is none, or it is wrong."""
    from sglang.srt.environ import envs

    field = getattr(envs, name, None)
    if field is None:
        return value
    try:
        return field.default if value is None else field.parse(value)
    except ValueError:
        return value


def _sglang_parses() -> bool:
    """Whether `EnvField.get` of SGLang asks `os.getenv` for a variable: it sees the parsed value only."""
    frame = sys._getframe(4)  # behind __getitem__, Mapping.get and os.getenv
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("sglang.srt.environ", "get")


class _Watched(os._Environ):
    """`os.environ` that notes the names that are asked for.

    Not those that are met in going through all: libraries copy them, or look for a prefix of their own.
    """

    names: ClassVar[set[str]] = set()
    as_strings: ClassVar[set[str]] = set()  # of `names`: not asked for by SGLang's parser only
    to_come: ClassVar[list[str]] = []  # of those that are met, last one first

    def __iter__(self) -> Iterator[str]:
        every = list(super().__iter__())
        self.to_come[:] = reversed(every)
        return iter(every)

    def __getitem__(self, key: str) -> str:
        if key in self.to_come[-1:]:
            self.to_come.pop()
        else:
            self.to_come.clear()
            self.names.add(key)
            if not _sglang_parses():
                self.as_strings.add(key)
        return super().__getitem__(key)


def _further_modules() -> Iterator[str]:
    yield from IMPORTED_WHERE_THEY_ARE
    (folder,) = importlib.import_module(OURS).__path__
    for path in sorted(Path(folder).rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if not OURS_LEFT_OUT.intersection(parts) and parts[-1] != "__init__":
            yield ".".join((OURS, *parts))


def _import_everything() -> tuple[dict[str, str | None], dict[str, str]]:
    """The variables that were read with their values, and those that were set."""
    before, plain = dict(os.environ), type(os.environ)
    os.environ.__class__ = _Watched
    gc.disable()  # imports free next to nothing, and every collection goes through all that was imported
    try:
        for name in IMPORTED:
            importlib.import_module(name)
        for name in _further_modules():
            with suppress(ImportError):  # also what is written for another release
                importlib.import_module(name)
    finally:
        gc.enable()
        os.environ.__class__ = plain
    changed = {k: v for k, v in os.environ.items() if before.get(k) != v}
    unseen = FOLDERS | PLUGINS | OF_GPUS
    return {name: os.environ.get(name) for name in _Watched.names - unseen}, changed


# Host and helpers

# In a child whose order says so: the socket and the pid of a host that nobody else uses.
OWN_HOST: tuple[socket.socket, int] | None = None


class _Warm:
    """State that all children inherit."""

    read: dict[str, str | None]
    changed: dict[str, str]
    parsed: list[str]
    savings: Callable[[], None]


def _main(descriptor: int, has_hosts: bool) -> None:
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    setproctitle.getproctitle()  # it looks for its memory beside an environment that nobody has changed yet
    import savings  # beside this script, whose folder is the first one

    sys.path.pop(0)
    _Warm.read, _Warm.changed = _import_everything()
    _Warm.parsed = sorted(_Watched.names - _Watched.as_strings)
    _Warm.savings = savings.install
    tempfile.tempdir = None
    if has_hosts:
        gc.collect()
        gc.freeze()
        _say_hello_and_serve(connection)
    else:
        _be_host(connection)


def _be_host(connection: socket.socket) -> None:
    _Warm.savings()
    gc.collect()
    gc.freeze()  # else each child's first collection copies all pages
    _say_hello_and_serve(connection)


def _say_hello_and_serve(connection: socket.socket) -> None:
    if len(os.listdir("/proc/self/task")) > 1:
        return  # a fork would lose the other threads
    said = {"read": _Warm.read, "changed": _Warm.changed, "parsed": _Warm.parsed}
    connection.send(json.dumps(said).encode())
    _serve(connection)


def _serve(connection: socket.socket) -> None:
    """Fork for orders until nobody asks any more. Returns in the children only, when they are done."""
    while True:
        message, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_FDS)
        if not message:
            os._exit(0)
        order = Order(**json.loads(message))
        pid = _fork_for_asker()
        if pid == 0:
            connection.close()
            if order.has_host and not _fork_host(fds):
                return None
            _settle_in(order, fds)
            return _run(order)
        for fd in fds:
            os.close(fd)
        connection.send(str(pid).encode())


def _fork_host(fds: Sequence[int]) -> bool:
    """True in this process; False in what its host has forked, when it is done."""
    global OWN_HOST
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for fd in fds:
            os.close(fd)
        ours.close()
        _be_host(theirs)
        return False
    theirs.close()
    OWN_HOST = ours, pid
    return True


def _fork_for_asker() -> int:
    """As os.fork(), but the child's parent is the next subreaper above: whoever asks."""
    pid_out, pid_in = os.pipe()
    go_out, go_in = os.pipe()
    middle = os.fork()
    if middle == 0:
        child = os.fork()
        if child:
            os.write(pid_in, str(child).encode())
            os._exit(0)
        os.close(go_in)
        os.read(go_out, 1)  # until `middle` has ended
        for fd in (pid_out, pid_in, go_out):
            os.close(fd)
        return 0
    os.waitpid(middle, 0)
    pid = int(os.read(pid_out, 20))
    for fd in (pid_out, pid_in, go_out, go_in):
        os.close(fd)
    return pid


# Children


def _settle_in(order: Order, fds: Sequence[int]) -> None:
    """Descriptors, environment, folder and import path as those of a fresh interpreter."""
    lowest_free = max(order.fds, default=0) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, lowest_free) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, wanted in zip(moved, order.fds, strict=True):
        os.dup2(fd, wanted)
        os.close(fd)
    # What was opened on a file cannot be set up for a pipe
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding=sys.stdout.encoding, closefd=False)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(_Warm.changed | order.env)
    os.chdir(order.folder)
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [order.folder, *(path for path in more if path and path not in paths)]
    for name, (module, constant) in READ_AGAIN.items():
        if os.environ.get(name) != _Warm.read.get(name):
            from sglang.srt.environ import envs

            setattr(sys.modules[module], constant, getattr(envs, name).get())


def _run(order: Order) -> None:
    if order.launches and not _fork_helper():
        return
    option, program, *arguments = order.argv
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def _fork_helper() -> bool:
    """True in this process; False in what the helper has forked, when it is done."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        ours.close()
        _serve(theirs)
        return False
    theirs.close()
    become_subreaper()
    util.spawnv_passfds = _forking_for_spawn(ours, util.spawnv_passfds)
    return True


def _forking_for_spawn(
    helper: socket.socket, launch: Callable[..., int]
) -> Callable[[bytes, Sequence[str], Sequence[int]], int]:
    """In place of `multiprocessing.util.spawnv_passfds`, which launches a fresh interpreter."""

    def spawnv_passfds(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
        as_before = reads_the_same(_Warm.read, os.environ, _Warm.parsed)
        if "--multiprocessing-fork" not in args or not as_before:
            return launch(path, args, passfds)
        fds = sorted(map(int, passfds))
        argv = [*args[args.index("-c") :]]
        return ask(helper, Order(argv, dict(os.environ), os.getcwd(), fds), fds)

    return spawnv_passfds


if __name__ == "__main__":
    _main(int(sys.argv[1]), has_hosts=sys.argv[2:] == [HAS_HOSTS])
