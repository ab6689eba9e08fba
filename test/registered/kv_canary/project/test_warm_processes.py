"""A process that is forked from one with SGLang imported is what a fresh one would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.fresh_process import FreshProcesses
from sglang_kv_canary_rigs.warm import WarmProcess, WarmProcesses, shared
from sglang_kv_canary_rigs.warm.host import HAS_HOSTS, reads_the_same

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="servers are not forked then")


def start(folder: Path, code: str, *argv: str, **env: str) -> WarmProcess:
    command = [sys.executable, "-W", "ignore", "-c", dedent(code), *argv]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return shared().popen(command, stdout=out, stderr=err, env={**os.environ, **env})


def fresh_python(code: str, *argv: str, env: Mapping[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", "-c", dedent(code), *argv]
    return subprocess.check_output(command, text=True, env={**os.environ, **env})


# What surrounds a program

SURROUNDINGS = """
import json, os, signal, sys, tempfile, threading
descriptors = {int(fd) for fd in os.listdir("/proc/self/fd")} - {os.open(".", 0)}
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "parent": os.getppid(),
    "mine": os.environ.get("KV_CANARY_MINE"), "temporary": tempfile.gettempdir(),
    "open": sorted(fd for fd in descriptors if os.path.exists(f"/proc/self/fd/{fd}") and fd < 3),
    "sigterm": str(signal.getsignal(signal.SIGTERM)), "sigchld": str(signal.getsignal(signal.SIGCHLD)),
    "threads": threading.active_count(), "options": sys.warnoptions,
}))
"""


def test_surroundings_are_those_of_a_fresh_process(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    env = {"KV_CANARY_MINE": "1", "PYTHONPATH": str(plugins), "TMPDIR": str(tmp_path)}
    process = start(tmp_path, SURROUNDINGS, "--a", "b", **env)
    assert process.wait(60) == 0, (tmp_path / "err").read_text()
    found = json.loads((tmp_path / "out").read_text())
    expected = json.loads(fresh_python(SURROUNDINGS, "--a", "b", env=env))
    # A fresh interpreter's "" for -c is the folder that it started in.
    expected["path"] = [path or expected["folder"] for path in expected["path"]]
    assert found == expected


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" not in os.environ, reason="lifted by more test processes than one"
)
def test_a_test_process_has_been_forked_together_with_its_host() -> None:
    (connection, host) = sys.modules["__main__"].OWN_HOST
    assert psutil.Process(host).ppid() == os.getpid()
    assert HAS_HOSTS in psutil.Process(host).cmdline()
    assert connection is shared()._hosts[0]._connection
    assert "sglang.srt.managers.scheduler" in sys.modules


def test_no_plugin_is_loaded_yet() -> None:
    code = "from sglang.srt import plugins; print(int(plugins._plugins_loaded))"
    assert FreshProcesses().run(code).result == 0


def test_constants_that_imports_read_are_read_again() -> None:
    code = "from sglang.srt.managers import scheduler as s; print(s.TEST_RETRACT_INTERVAL)"
    assert FreshProcesses().run(code).result == 3
    assert FreshProcesses().run(code, env={"SGLANG_TEST_RETRACT_INTERVAL": "10"}).result == 10


class _NothingToFork(WarmProcesses):
    """As on machines where SGLang's imports start threads."""

    def _host_for(self, env: Mapping[str, str]) -> None:
        return None


def test_where_nothing_can_be_forked_a_snippet_gets_a_fresh_process(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1], os.environ['KV_CANARY_MINE'], os.environ['KV_CANARY_READ'])"
    with (tmp_path / "out").open("w+") as out, _NothingToFork() as warm:
        process = warm.run_snippet(
            code,
            "a",
            stdout=out,
            stderr=out,
            env={"KV_CANARY_MINE": "1"},
            for_imports={"KV_CANARY_READ": "2"},
        )
        assert process.wait(60) == 0
        out.seek(0)
        assert out.read() == "a 1 2\n"


def test_another_value_of_what_imports_have_read_needs_another_host() -> None:
    read: dict[str, str | None] = {"SGLANG_PLATFORM": None, "OMP": "1", "SGLANG_TEST_RETRACT": None}
    assert reads_the_same(read, {"OMP": "1", "UNREAD": "x", "SGLANG_TEST_RETRACT": "1"})
    assert not reads_the_same(read, {"OMP": "2"})
    assert not reads_the_same(read, {"OMP": "1", "SGLANG_PLATFORM": "mine"})


@pytest.mark.parametrize(
    ("value", "same"), [("0", True), ("False", True), ("1", False), ("perhaps", False)]
)
def test_of_what_sglang_parses_only_the_meaning_counts(value: str, same: bool) -> None:
    read, env = {"SGLANG_IS_IN_CI": None}, {"SGLANG_IS_IN_CI": value}
    assert reads_the_same(read, env, parsed=["SGLANG_IS_IN_CI"]) == same
    assert not reads_the_same(read, env)


CHANGE_AND_LAUNCH = """
import multiprocessing, os, sys
multiprocessing.set_start_method("spawn", force=True)
os.environ.update([sys.argv[1:]])
code = "import sys; sys.exit(10 + ('sglang.srt.managers.scheduler' in sys.modules))"
child = multiprocessing.Process(target=exec, args=(code,))
child.start()
child.join()
sys.exit(child.exitcode)
"""


@pytest.mark.parametrize(
    ("name", "value", "forked"),
    [
        ("SGLANG_IS_IN_CI", "0", True),  # read through SGLang's parser only
        ("SGLANG_IS_IN_CI", "1", False),
        ("SGLANG_USE_AITER", "0", False),  # read as a string, too
    ],
)
def test_a_variable_set_after_the_imports(
    tmp_path: Path, name: str, value: str, forked: bool
) -> None:
    process = start(tmp_path, CHANGE_AND_LAUNCH, name, value)
    assert process.wait(600) == 10 + forked, (tmp_path / "err").read_text()


def test_only_this_interpreter_is_forked() -> None:
    with pytest.raises(ValueError, match="not a command that can be forked"):
        shared().popen(["bash", "-W", "ignore", "-c", ""], stdout=None, stderr=None, env=os.environ)


# How a program ends


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise ValueError", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_codes_are_those_of_a_fresh_process(tmp_path: Path, code: str, returncode: int) -> None:
    assert start(tmp_path, code).wait(60) == returncode


def test_an_end_runs_what_is_registered_and_flushes(tmp_path: Path) -> None:
    code = "import atexit; atexit.register(print, 'last'); print('first'); raise ValueError('why')"
    assert start(tmp_path, code).wait(60) == 1
    assert (tmp_path / "out").read_text() == "first\nlast\n"
    assert (tmp_path / "err").read_text().endswith("ValueError: why\n")


def test_waiting_too_long_is_told(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


# Processes that it launches

LAUNCH = """
import json, multiprocessing, os, sys, time
multiprocessing.set_start_method("spawn", force=True)
reader, writer = multiprocessing.Pipe(duplex=False)
os.environ["KV_CANARY_MINE"] = "late"
code = "import os, sys; from sglang.srt import plugins; "
code += "writer.send([os.getppid(), os.environ['KV_CANARY_MINE'], plugins._plugins_loaded]); sys.exit(5)"
child = multiprocessing.Process(target=exec, args=(code, {"writer": writer}))
plugins_loaded_here = __import__("sglang.srt.plugins").srt.plugins
plugins_loaded_here._plugins_loaded = True
child.start()
said = reader.recv()
child.join()
print(json.dumps([said, os.getpid(), child.exitcode]))
lasting = multiprocessing.Process(target=time.sleep, args=(600,))
lasting.start()
print(lasting.pid, flush=True)
time.sleep(600)
"""


def test_processes_by_spawn_are_children_without_what_was_done_before(tmp_path: Path) -> None:
    process = start(tmp_path, LAUNCH)
    main = psutil.Process(process.pid)
    said = tmp_path / "out"
    while said.read_text().count("\n") < 2:
        assert process.poll() is None, (tmp_path / "err").read_text()
    first, lasting = map(json.loads, said.read_text().splitlines())
    assert first == [[process.pid, "late", False], process.pid, 5]
    assert psutil.Process(lasting).ppid() == process.pid
    family = main.children(recursive=True)
    assert lasting in {child.pid for child in family}
    os.kill(lasting, signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    _, left = psutil.wait_procs([child for child in family if is_helper(child)], timeout=60)
    assert left == []


def is_helper(process: psutil.Process) -> bool:
    try:
        return any(part.endswith("host.py") for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


# What waits

WAIT = """
import json, threading, time, zmq
from types import SimpleNamespace
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.managers.scheduler import Scheduler

context = zmq.Context()
inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
outbox.connect(f"tcp://127.0.0.1:{inbox.bind_to_random_port('tcp://127.0.0.1')}")

def send_late():
    time.sleep(0.5)
    for word in ("first", "last"):
        time.sleep(0.5)
        outbox.send_pyobj(word)

def dispatch(word):
    heard.append(word)
    if word == "last":
        raise StopIteration

def idle():
    Scheduler.maybe_sleep_on_idle(SimpleNamespace(recv_from_tokenizer=inbox))
    while inbox.poll(0):
        dispatch(inbox.recv_pyobj())

controller = DataParallelController.__new__(DataParallelController)
controller.recv_from_tokenizer = inbox
controller.soft_watchdog = SimpleNamespace(feed=lambda: None)
controller._request_dispatcher = dispatch
costs = []
for wait in (controller.event_loop, idle):
    heard, before = [], time.thread_time()
    threading.Thread(target=send_late).start()
    try:
        while True:
            wait()
    except StopIteration:
        costs.append([heard, time.thread_time() - before])
print(json.dumps(costs))
"""


def test_what_waits_for_messages_gets_them_and_takes_no_core() -> None:
    for heard, seconds in FreshProcesses().run(WAIT).result:
        assert heard == ["first", "last"]
        assert seconds < 0.5, "of at least one"


# What is compiled at its first call

COMPILED = """
import inspect, json, sys
from types import FunctionType
import sglang.srt.layers.moe.topk, sglang.srt.sampling.sampling_batch_info
modules = [module for name, module in [*sys.modules.items()] if name.startswith("sglang.")]
found = {value for module in modules for value in [*vars(module).values()] if isinstance(value, FunctionType)}
decorated = ["@torch.compile" in inspect.getsource(value).partition("def ")[0] for value in found
             if str(value.__module__).startswith("sglang.")]
print(json.dumps([sum(decorated), sum("_torchdynamo_orig_callable" in vars(value) for value in found)]))
"""


def test_functions_that_sglang_compiles_run_as_they_are_written() -> None:
    """A rank would compile each of them for seconds, or for a minute."""
    decorated, compiled = FreshProcesses().run(COMPILED).result
    assert decorated > 5
    assert compiled == 0


# What is imported before

IMPORTS = """
import json, sys
from sglang.srt.plugins import load_plugins
before = set(sys.modules)
load_plugins()
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_a_plugin_finds_the_modules_of_the_canary_imported() -> None:
    """Each process of a server would import some hundred of them."""
    assert FreshProcesses().run(IMPORTS, env={"SGLANG_PLUGINS": "kv_canary"}).result == []


# SGLang's hooks

STALE = """
import json, sys
from pkgutil import resolve_name
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
stale = []
for target in HookRegistry._hooks:
    layer = resolve_name(target)
    layer = getattr(layer, "__func__", layer)
    while hasattr(layer, "__wrapped__"):
        layer = layer.__wrapped__
        for name, module in list(sys.modules.items()):
            found = [attribute for attribute, value in list(vars(module).items()) if value is layer]
            stale += [f"{name}.{attribute} of {target}" for attribute in found]
print(json.dumps([len(HookRegistry._patched), stale]))
"""


def test_hooks_reach_every_module_that_has_imported_their_target() -> None:
    """Ours are applied with one search, see `wiring/patch_scan.py`."""
    hooks, stale = FreshProcesses().run(STALE).result
    assert hooks > 40
    assert stale == []


BOUND_LATER = """
import json, sys
from types import ModuleType
from sglang.srt.managers import scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils import common
new = sys.modules["new"] = ModuleType("new")
new.bound = scheduler.bound_later = common.is_shm_available
HookRegistry.register("sglang.srt.utils.common.is_shm_available", lambda *_: "hooked", HookType.REPLACE)
load_plugins()
print(json.dumps([module(0) for module in (common.is_shm_available, new.bound, scheduler.bound_later)]))
"""


def test_hooks_reach_what_a_process_itself_has_bound() -> None:
    """What was bound before the fork is known. New modules are not, and neither are names that were added since."""
    assert FreshProcesses().run(BOUND_LATER).result == ["hooked"] * 3


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
