"""Processes compile what the scheduler process will launch, and it finds all of that in Triton's cache."""

import fcntl
import sys
import textwrap
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import psutil
import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.compile_folder import COMPILES_ENV
from sglang_kv_canary.kernels.triton.capability import capability_of
from sglang_kv_canary.kernels.triton.compile_requests import CompileRequests, write_answer
from sglang_kv_canary_rigs.fresh_process import FreshProcesses
from sglang_kv_canary_rigs.volume import FULL_VOLUME, volume

register_cpu_ci(est_time=90, suite="stage-a-test-cpu")

# A process of its own, whose kernels are defined for the compiler. Triton's launches run whole, but for the driver.
PREPARE = """
import logging, os, sys, time
from pathlib import Path

import torch, triton
from triton.backends.compiler import GPUTarget

from sglang_kv_canary.compile_folder import FOLDER_ENV
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.kernels.triton.compile_ahead import AHEAD
from sglang_kv_canary.kernels.triton.compile_requests import (
    PREDICTED, CompileRequests, CompileServerProcess
)
from sglang_kv_canary.kernels.triton.kernel_launcher import KernelLauncher
from sglang_kv_canary.kernels.triton.variant import Variant
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary_rigs.kernel_cases import ContentShape, Pool, make_group, make_state
from sglang_kv_canary.config import ContentMode

logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s", force=True)
launched, compiled = [], []


class Launcher:
    def __init__(self, source, metadata):
        self.name = source.fn.__name__

    def __call__(self, *arguments):
        launched.append(self.name)


class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 18}

    def load_binary(self, name, binary, shared, device):
        return None, None, 0, 0, 1024


class Driver:
    launcher_cls, utils = Launcher, Utils()

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


triton.runtime.driver.set_active(Driver())


def listen(src, metadata, metadata_group, times, cache_hit):
    compiled.append((src.fn.__name__, cache_hit))


triton.knobs.compilation.listener = listen
device = torch.device("cpu")
state, pool = make_state(device), Pool(device, 200, 100, 8)
pool.extend({1: 9, 2: 1})
group = make_group(200, device=device, content=ContentShape((64, 64)))
listed = torch.arange(100)


LARGE_ONES = True  # of the kernels, which take most of the time
NUM_LAUNCHES = 7 if LARGE_ONES else 5


def launches():
    if LARGE_ONES:
        decode = pool.decode([1, 2])
        triton_backend.check_and_write(decode, group, Side.TAIL, state)
        triton_backend.check_and_write_content(decode, group, state, ContentMode.ALL, 8)
    for slots in (listed, listed.int()):
        triton_backend.note_next_tokens(listed, slots, None, (group,), state)
        triton_backend.apply_slot_event(SlotEventKind.FREE, slots, group, state)
    triton_backend.apply_slot_event(SlotEventKind.CLEAR, None, group, state)


def start(**settings):
    server = CompileServerProcess(**{"target": "90", "processes": 2, **settings})
    os.environ[FOLDER_ENV] = str(server.folder)
    return server


def wait_until(done):
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
"""


if not FULL_VOLUME:
    PREPARE = PREPARE.replace("LARGE_ONES = True", "LARGE_ONES = False")


def run(program: str, tmp_path: Path) -> list[str]:
    ended = FreshProcesses().run(
        PREPARE + textwrap.dedent(program),
        env={"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)},
        for_imports={COMPILES_ENV: "1", "TRITON_INTERPRET": "0"},
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout.splitlines()


@pytest.fixture(autouse=True)
def _nvidia() -> None:
    pytest.importorskip("triton.backends.nvidia")


def test_the_scheduler_finds_in_the_cache_what_was_predicted_elsewhere(tmp_path) -> None:
    """As a server does it: one process predicts, others compile, and this one has compiled other kernels before."""
    program = """
    told, tells = os.pipe()
    if (predicting := os.fork()) == 0:
        folder = Path(os.read(told, 4096).decode())
        with triton_backend.collecting_variants() as variants:
            launches()
        assert len(variants) == NUM_LAUNCHES and not compiled
        CompileRequests(folder).ask(variants.values(), PREDICTED)
        os._exit(0)

    from sglang_kv_canary.kernels.triton.device.sweep_kernel import list_kernel
    from sglang_kv_canary.plan.plan_input import SweepVerifyPlan

    triton_backend.check_list(SweepVerifyPlan(listed, listed, listed), group, state)
    assert compiled == [("list_kernel", False)], compiled
    compiled.clear(), launched.clear()
    server = start()
    os.write(tells, str(server.folder).encode())
    assert os.waitpid(predicting, 0)[1] == 0
    wait_until(lambda: len(list(server.folder.glob("*.answer"))) == NUM_LAUNCHES)
    with triton_backend.compiling_ahead() as compiles:
        assert compiles and AHEAD.requests is not None
        launches()
    assert not launched and not compiled
    launches()
    assert len(launched) == NUM_LAUNCHES, launched
    assert len(compiled) == NUM_LAUNCHES and all(hit for _, hit in compiled), compiled
    assert AHEAD.requests is not None and AHEAD._compiling is None  # no thread was needed
    assert len(list(server.folder.glob("*.answer"))) == NUM_LAUNCHES  # nothing twice
    server.stop()
    assert not server.folder.exists()
    print("done")
    """
    assert run(program, tmp_path) == ["done"]


def test_what_nobody_predicted_is_compiled_by_the_server_too(tmp_path) -> None:
    """Also where SGLang moves Triton's cache in between."""
    program = """
    server = start()
    with triton_backend.compiling_ahead():
        launches()
    os.environ["TRITON_CACHE_DIR"] = elsewhere = os.environ["TMPDIR"] + "/elsewhere"
    launches()
    triton_backend.finish_compiling()
    assert len(launched) == NUM_LAUNCHES
    assert len(compiled) == NUM_LAUNCHES and all(hit for _, hit in compiled), compiled
    assert os.environ["TRITON_CACHE_DIR"] == elsewhere and not os.path.exists(elsewhere)
    server.stop()
    print("done")
    """
    assert run(program, tmp_path) == ["done"]


FAULTS = [
    ("server = start(target='100')", "for another GPU"),
    ("server = start(target='nothing')", "failed: ValueError"),
    ("server = start()\n    kill_at_first_answer(server)", "the compile server has ended"),
]


@pytest.mark.parametrize(("fault", "why"), FAULTS[: volume(1, len(FAULTS))])
def test_threads_compile_what_the_server_does_not(fault, why, tmp_path) -> None:
    program = f"""
    import signal, threading

    def kill_at_first_answer(server):
        def kill():
            wait_until(lambda: list(server.folder.glob("*.answer")))
            os.killpg(server.pid, signal.SIGKILL)
        threading.Thread(target=kill).start()

    {fault}
    with triton_backend.compiling_ahead():
        launches()
    launches()
    assert len(launched) == NUM_LAUNCHES, launched
    assert AHEAD.requests is None and AHEAD._compiling is not None
    triton_backend.finish_compiling()
    server.stop()
    """
    lines = run(program, tmp_path)
    assert len(lines) == 1, lines
    assert why in lines[0]
    assert lines[0].startswith("WARNING kv-canary compiles its kernels in threads: "), lines


def test_a_server_that_is_gone_is_not_asked(tmp_path) -> None:
    program = """
    start().stop()
    with triton_backend.compiling_ahead():
        launches()
    assert AHEAD.requests is None
    launches()
    assert len(launched) == NUM_LAUNCHES, launched
    triton_backend.finish_compiling()
    print("done")
    """
    assert run(program, tmp_path) == ["done"]


@pytest.mark.parametrize("answer", [None, "its hash"])
def test_who_waits_for_a_server_notices_its_end(answer: str | None, tmp_path: Path) -> None:
    """It lives at first. The lock is all that is seen of it, and this process holds it here."""
    variant, found = SimpleNamespace(name="a"), []
    (tmp_path / "cache").write_text("")
    with open(tmp_path / "alive", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        requests = CompileRequests(tmp_path)
        waiting = Thread(target=lambda: found.append(requests.answer(variant)), daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        assert requests.is_served
        if answer is not None:
            write_answer(tmp_path, "a", answer)
    waiting.join(30.0)
    assert found == [answer]


def test_the_driver_says_what_gpu_it_compiles_for() -> None:
    if torch.cuda.is_available():
        assert capability_of(0) == "".join(map(str, torch.cuda.get_device_capability(0)))
    else:
        with pytest.raises(RuntimeError, match="does not say what GPU 0 is"):
            capability_of(0)


def runs(pid: int) -> bool:
    """False for what has ended, also where nobody asks for its status."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ENDINGS = {
    "its parent is killed": "os._exit(0)",
    "its folder is gone": "import shutil; shutil.rmtree(server.folder)",
    "it is stopped": "server.stop()",
}


@pytest.mark.parametrize("ending", list(ENDINGS)[: volume(1, len(ENDINGS))])
def test_nothing_of_the_server_is_left_after(ending, tmp_path) -> None:
    """Here while it compiles, which takes seconds."""
    program = f"""
    server = start()
    with triton_backend.collecting_variants() as variants:
        triton_backend.check_and_write(pool.extend({{1: 9}}), group, Side.HEAD, state)
    CompileRequests(server.folder).ask(variants.values(), PREDICTED)
    import psutil
    children = psutil.Process(server.pid).children
    wait_until(children)
    print(server.pid, *(child.pid for child in children()), flush=True)
    {ENDINGS[ending]}
    """
    (line,) = run(program, tmp_path)
    pids = [int(pid) for pid in line.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


def test_every_process_knows_kernels_by_the_same_keys(tmp_path) -> None:
    """Triton's keys depend on what was compiled before. So all of ours are worked out at once, callees first."""
    program = """
    from sglang_kv_canary.kernels.triton import jit

    functions = jit._compiled
    keys = [function.cache_key for function in functions]
    assert len(set(keys)) == len(keys) > 90
    for function in functions:
        function.hash = None
    jit.settle_cache_keys()  # all callees are known now, also those that are defined after their callers
    assert keys == [function.cache_key for function in functions]
    for function in functions:
        values = dict()
        for (name, _), (value, _) in function.used_global_vals.items():
            # Constants of one name are in the order of their modules' addresses.
            assert values.setdefault(name, repr(value)) == repr(value), (function, name)
    print("done")
    """
    assert run(program, tmp_path) == ["done"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
