"""A real engine in this process, or a real HTTP server beside it, under the canary."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.error import HTTPError

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ..perturb.control_folder import Command, ControlFolder, address_of
from . import consts
from .fill_ins import plugin_path
from .mode_config import ModeConfig, server_args_of
from .replica_ports import REPLICA_PORTS, ports_of_replicas

T = TypeVar("T")
Asked = tuple[str, list[int], int]  # request id, prompt, output tokens
STARTUP_TIMEOUT_S = consts.PROCESS_TIMEOUT_S
REQUEST_TIMEOUT_S = 300.0
SHOWN_OF_STDERR = 8000  # characters
ANSWER_TIMEOUT_S = 120.0  # a loaded machine takes seconds for what an idle one does in milliseconds
POLL_S = 0.01
PLUGINS = "plugins"  # in the folder of a `Serving`
# A unix socket's path has at most 107 bytes; SGLang and torch append up to 40 to the folder for temporary files.
SOCKET_PATH_BYTES, SOCKET_NAME_BYTES = 107, 40
# Another process could get a port before it is bound: Mooncake takes its ports at random from 15000 to 17000, both of
# them included, and Linux assigns those from 32768 on.
MOONCAKE_PORTS = range(15_000, 17_001)
PORTS = range(11_000, MOONCAKE_PORTS.start)
# With DP attention, a server binds the seven ports from 233 above its own: servers 8 apart never share one.
SERVER_PORTS = range(17_008, 22_400, 8)
SERVER_PORT_OFFSETS = (0, *range(233, 240), 10_000)  # the last is ServerArgs.grpc_port
MAX_SHARES = 30  # of the ports; further workers share them


class Serving(ABC):
    """The common part of engine and server: a folder with the model, the events and the controls.

    A context manager. `flags` are fields of `ServerArgs` that override the mode's. `env` is added to the environment of
    the serving processes. `plugins` are functions that these processes load as plugins of SGLang.
    """

    def __init__(
        self,
        mode: ModeConfig,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        plugins: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.mode = mode
        self._temporary = tempfile.TemporaryDirectory(prefix="kv_canary_e2e_")
        self.folder = Path(self._temporary.name)
        self.event_file = self.folder / "events.jsonl"
        self.controls = self.folder / "controls"
        self.controls.mkdir()
        self.server_args = {
            "model_path": mode.write_model(self.folder / "model"),
            "port": free_server_port(),
            "nccl_port": free_port(),  # otherwise SGLang picks one long before it binds it
            **server_args_of(mode),
            **(flags or {}),
        }
        self.env = {
            "SGLANG_KV_CANARY_EVENT_FILE": str(self.event_file),
            "SGLANG_KV_CANARY_PERTURB_DIR": str(self.controls),
            # A slot that a fault hands out twice also breaks SGLang's own accounting.
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
            # The ranks' processes read the machine's free memory one after another, while other tests run.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            **({} if torch.cuda.is_available() else {"SGLANG_USE_CPU_ENGINE": "1"}),
            **mode.env,
            **(env or {}),
        }
        if self.server_args["nccl_port"] is None:
            replicas = range(self.server_args.get("dp_size", 1))
            self.env[REPLICA_PORTS] = ",".join(str(free_port()) for _ in replicas)
            plugins = (*plugins, ports_of_replicas)
        fill_ins = () if torch.cuda.is_available() else mode.cpu_fill_ins
        if fill_ins or plugins:
            self.env["PYTHONPATH"] = plugin_path(self.folder / PLUGINS, (*fill_ins, *plugins))
        if len(str(self.folder)) + SOCKET_NAME_BYTES <= SOCKET_PATH_BYTES:
            self.env["TMPDIR"] = str(self.folder)  # removed together with the folder
            self.env["TORCHINDUCTOR_CACHE_DIR"] = cache_dir()  # compiled code is kept
        self._commands = 0

    # Serving

    @abstractmethod
    def __enter__(self) -> Serving: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it still serves."""

    @property
    @abstractmethod
    def stderr(self) -> str:
        """The server's stderr, if it is not this process's own."""

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, which uses this object as a `traffic.Client`."""

    @abstractmethod
    async def generate(
        self, request_id: str, input_ids: list[int], max_new_tokens: int
    ) -> list[int]: ...

    @abstractmethod
    async def generate_together(self, requests: Sequence[Asked]) -> list[list[int]]:
        """Serve `requests` in one message: the scheduler queues all of them at once, in this order.

        Under DP attention they follow each other closely instead. Each request needs its own id.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None: ...

    @abstractmethod
    async def flush(self) -> bool: ...

    # Events

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """All events so far, of `kind` if given."""
        if not self.event_file.exists():
            return []
        whole_lines = self.event_file.read_text().rpartition("\n")[0]  # one may be half written
        events = [json.loads(line) for line in whole_lines.splitlines() if line]
        return [e for e in events if kind in (None, e["event"])]

    # Faults

    @property
    def ranks(self) -> list[dict[str, int]]:
        """Each scheduler process, as `send` takes it."""
        args = self.server_args
        replicas = 1 if args.get("enable_dp_attention") else args.get("dp_size", 1)
        return [
            {"rank": tp, "pp_rank": pp, "replica": replica}
            for replica in range(replicas)
            for pp in range(args.get("pp_size", 1))
            for tp in range(args.get("tp_size", 1))
        ]

    def send(
        self,
        fault: str,
        rank: int = 0,
        role: str = "target",
        pp_rank: int = 0,
        replica: int = 0,
        **args: Any,
    ) -> Injection:
        """Request `fault` from the scheduler process, see `perturb.faults`. It may have to wait for a request."""
        self._commands += 1
        command = Command(f"{self._commands:04d}-{fault}", fault, args)
        controls = ControlFolder(self.controls, address_of(role, rank, pp_rank, replica))
        controls.send(command)
        return Injection(self, controls, command)

    def wait_for(
        self,
        found: Callable[[], T | None],
        what: str,
        timeout_s: float = ANSWER_TIMEOUT_S,
        poll_s: float = POLL_S,
    ) -> T:
        """The result of `found` once it is true. Raises TimeoutError, or RuntimeError at once if nothing serves."""
        deadline = time.monotonic() + timeout_s
        while True:
            alive = self.alive
            if value := found():
                return value
            if not alive:
                raise RuntimeError(f"the server ended before {what}:\n{self.stderr}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {timeout_s:g} s: {what}")
            time.sleep(poll_s)


class Injection:
    """A command that has been sent."""

    def __init__(self, serving: Serving, controls: ControlFolder, command: Command) -> None:
        self._serving, self._controls, self.command = serving, controls, command

    def withdraw(self) -> None:
        """Withdraw the command. Does nothing if it has been executed."""
        if self._controls.answer(self.command.name) is None:
            self._controls.withdraw(self.command.name)

    async def executed(self) -> dict[str, Any]:
        """`answer`, for code that must let requests continue in that time."""
        return await asyncio.to_thread(self.answer)

    def answer(self) -> dict[str, Any]:
        """What was done. Raises TimeoutError if it never could, RuntimeError if it failed or nothing serves."""
        name = self.command.name
        try:
            answer = self._serving.wait_for(
                lambda: self._controls.answer(name), f"{self.command} was executed"
            )
        except TimeoutError:
            self._controls.withdraw(name)
            raise
        if "error" in answer:
            raise RuntimeError(f"{self.command} failed: {answer['error']}")
        return answer


class CanaryEngine(Serving):
    """`sglang.Engine` in this process. Its shutdown ends all child processes of this process."""

    def __enter__(self) -> CanaryEngine:
        # A spawned process has the import path of this one, whatever PYTHONPATH is by then.
        with _environment(self.env), _import_path(self.folder / PLUGINS):
            self.engine = self.start()
        return self

    def start(self) -> Any:
        """The engine, with `server_args`."""
        import sglang

        return sglang.Engine(**self.server_args)

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()
        self._temporary.cleanup()

    @property
    def alive(self) -> bool:
        return True  # the death of a scheduler also ends this process

    @property
    def stderr(self) -> str:
        return ""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.engine.loop.run_until_complete(work)

    async def generate(
        self, request_id: str, input_ids: list[int], max_new_tokens: int
    ) -> list[int]:
        answer = await self.engine.async_generate(
            input_ids=input_ids,
            rid=request_id,
            sampling_params=_sampling_params(max_new_tokens),
        )
        return answer["output_ids"]

    async def generate_together(self, requests: Sequence[Asked]) -> list[list[int]]:
        answers = await self.engine.async_generate(**_together(requests))
        return [answer["output_ids"] for answer in answers]

    async def abort(self, request_id: str) -> None:
        self.engine.tokenizer_manager.abort_request(request_id)

    async def flush(self) -> bool:
        return (await self.engine.tokenizer_manager.flush_cache(timeout_s=60.0)).success


class CanaryServer(Serving):
    """`python -m sglang.launch_server`, with its output in `stderr` and `stdout` of the folder.

    `popen` starts it: subprocess.Popen, or what takes and returns the same.
    """

    popen: ClassVar[Callable[..., subprocess.Popen]] = subprocess.Popen

    def __enter__(self) -> CanaryServer:
        with self.starting():
            pass
        return self

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Starts the server, and at the end waits until it is ready. An error in between ends it."""
        command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server"]
        flags = command_line(self.server_args)
        with (self.folder / "stdout").open("w") as out, (self.folder / "stderr").open("w") as err:
            self.process = self.popen(
                [*command, *flags], stdout=out, stderr=err, env={**os.environ, **self.env}
            )
        try:
            yield
            self._wait_until_ready()
        except BaseException:
            CanaryServer.__exit__(self)
            raise

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            _kill_tree(self.process.pid)
        self.process.wait(30)
        self._temporary.cleanup()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_args['port']}"

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def admin(self) -> dict[str, str]:
        """Headers that show the server's admin key, if it has one."""
        key = self.server_args.get("admin_api_key")
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON answer to a GET. Raises HTTPError for an error status."""
        request = urllib.request.Request(self.url + path, headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Any:
        """The answer to a POST of JSON, parsed if it is JSON. Raises HTTPError for an error status."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                text = answer.read().decode()
        except HTTPError as error:
            error.msg = f"{error.msg}: {error.read(4096).decode(errors='replace')}"
            raise
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def with_session() -> T:
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
            # Otherwise a request may use an idle connection that the server, after 5 s, is just closing.
            once = aiohttp.TCPConnector(force_close=True)
            async with aiohttp.ClientSession(timeout=timeout, connector=once) as self._session:
                return await work

        return asyncio.run(with_session())

    async def generate(
        self, request_id: str, input_ids: list[int], max_new_tokens: int
    ) -> list[int]:
        body = {
            "rid": request_id,
            "input_ids": input_ids,
            "sampling_params": _sampling_params(max_new_tokens),
        }
        try:
            async with self._session.post(f"{self.url}/generate", json=body) as answer:
                return (await answer.json()).get("output_ids", [])
        except asyncio.TimeoutError as error:
            said = self.stderr[-SHOWN_OF_STDERR:]
            raise TimeoutError(
                f"request {request_id} ({len(input_ids)} + {max_new_tokens} tokens) has no answer after "
                f"{REQUEST_TIMEOUT_S:g} s; the server said last:\n{said}"
            ) from error

    async def generate_together(self, requests: Sequence[Asked]) -> list[list[int]]:
        async with self._session.post(f"{self.url}/generate", json=_together(requests)) as answer:
            return [one["output_ids"] for one in await answer.json()]

    async def abort(self, request_id: str) -> None:
        url, body = f"{self.url}/abort_request", {"rid": request_id}
        async with self._session.post(url, json=body, headers=self.admin):
            pass

    async def flush(self) -> bool:
        url = f"{self.url}/flush_cache?timeout=60"
        async with self._session.post(url, headers=self.admin) as answer:
            return answer.status == 200

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + STARTUP_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with code {self.process.returncode}:\n{self.stderr}"
                )
            try:
                self.get("/server_info")
            except OSError:
                time.sleep(5 * POLL_S)
            else:
                return
        raise TimeoutError(f"the server was not ready in {STARTUP_TIMEOUT_S:g} s:\n{self.stderr}")


def command_line(server_args: Mapping[str, Any]) -> list[str]:
    """`ServerArgs` fields as flags. True gives a bare flag, False and None give none."""
    flags: list[str] = []
    for name, value in server_args.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif value is not False and value is not None:
            flags += [flag, str(value)]
    return flags


def _sampling_params(max_new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}


def _together(requests: Sequence[Asked]) -> dict[str, Any]:
    """The fields of one SGLang request for all of them."""
    names, prompts, counts = zip(*requests, strict=True)
    return {
        "rid": list(names),
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": [_sampling_params(count) for count in counts],
    }


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _import_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


_ports_given: set[int] = set()


def free_port() -> int:
    """A free port, for one process to bind."""
    return _free_port(PORTS, (0,))


def free_server_port() -> int:
    """A free port for a server. The ports that SGLang derives from it are also free."""
    return _free_port(SERVER_PORTS, SERVER_PORT_OFFSETS)


def _free_port(ports: range, offsets: Sequence[int]) -> int:
    """One of `ports`, which can be bound at all `offsets` from it.

    It is bound seconds later. So no port is given twice, and each worker of pytest-xdist has its own ports.
    """
    shares = min(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), MAX_SHARES)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % shares
    left = [port for port in ports[number::shares] if port not in _ports_given]
    random.shuffle(left)
    for port in left:
        if all(_can_bind(port + offset) for offset in offsets):
            _ports_given.add(port)
            return port
    raise RuntimeError(f"no free port in {ports}: other processes have them all")


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _kill_tree(pid: int) -> None:
    import psutil

    parent = psutil.Process(pid)
    processes = [*parent.children(recursive=True), parent]
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=30)  # then none of them still writes to the folder
