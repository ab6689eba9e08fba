"""The end of a scheduler process: whatever ends it, findings that wait are named first."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.errors import CanaryViolationError
from sglang_kv_canary.reports.violation_reporter import LAST_WORDS_ENV
from sglang_kv_canary.wiring import farewell as module
from sglang_kv_canary.wiring import last_words
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.farewell import Farewell, ask_for_farewell
from sglang_kv_canary_rigs.fresh_process import FreshProcesses

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

# A process with the canary in which 25 causes were found, and 20 of them named.
PREPARE = """
import atexit, os, signal, time
from sglang_kv_canary.wiring import farewell, scheduler as hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.manager_rig import ManagerRig

rig = ManagerRig(log_every_s=1e9)
rig.extend(1, range(40))
rig.pool.k_buffer[1][rig.rows.req_to_token[1, :25].long()] += 1
rig.result(rig.decode([1]))
context.managers.append(rig.manager)
farewell.install_farewell()
"""
NAMED = re.compile(r"^(?:.*\] )?kv_canary violation: ", re.M)


@pytest.fixture(scope="module")
def fresh() -> FreshProcesses:
    return FreshProcesses()


def test_nothing_more_is_named_where_a_process_is_killed(fresh: FreshProcesses) -> None:
    """What the tests below add to."""
    ended = fresh.run(PREPARE + "os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.returncode == -signal.SIGKILL
    assert len(NAMED.findall(ended.stderr)) == 20


def test_files_of_a_long_run_look_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services remove what nobody has touched in TMPDIR for ten days. Those of others are theirs to touch."""
    farewell = Farewell(lambda: None, tmp_path)
    mine, others = tmp_path / f"{os.getpid()}.pid", tmp_path / "1.pid"
    socket = tmp_path / f"{os.getpid()}.sock"
    for path in (others, socket):
        path.touch()
    for path in (mine, socket, others, tmp_path):
        os.utime(path, (0, 0))
    farewell.attend()
    assert mine.stat().st_mtime == 0  # not yet
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    farewell._next_look = farewell._next_touch = 0.0
    farewell.attend()
    assert all(path.stat().st_mtime > 1e9 for path in (mine, socket, tmp_path))
    assert others.stat().st_mtime == 0


@pytest.mark.parametrize(
    "safe_point",
    [
        "hooks.after_idle(None, None)",
        "hooks._around_process_result(lambda *_: None, None, step, None)",
    ],
    ids=("idle", "result"),
)
def test_sigterm_names_the_rest_at_the_next_safe_point(
    fresh: FreshProcesses, safe_point: str
) -> None:
    code = f"""
from types import SimpleNamespace
hooks._step_of = lambda batch: batch
step = rig.recorder.begin_step([(1, "next")])
rig.recorder.end_step()
os.kill(os.getpid(), signal.SIGTERM)
print("lives on", flush=True)
{safe_point}
print("not reached", flush=True)
"""
    ended = fresh.run(PREPARE + code)
    assert ended.returncode == -signal.SIGTERM
    assert ended.stdout == "lives on\n"
    assert len(NAMED.findall(ended.stderr)) == 25


def test_sigterm_ends_a_process_that_comes_to_no_step(fresh: FreshProcesses) -> None:
    code = """
farewell.WAIT_S = 0.2
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
    ended = fresh.run(PREPARE + code)
    assert ended.returncode == -signal.SIGKILL
    assert len(NAMED.findall(ended.stderr)) == 25


def test_a_handler_of_somebody_else_stays(fresh: FreshProcesses) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('theirs', flush=True))\n"
    ended = fresh.run(code + PREPARE + "os.kill(os.getpid(), signal.SIGTERM)")
    assert (ended.returncode, ended.stdout) == (0, "theirs\n")


def test_an_exit_names_the_rest(fresh: FreshProcesses) -> None:
    """The host of the snippets ends them with os._exit, so what the interpreter calls at its end is called here."""
    ended = fresh.run(PREPARE + "atexit._run_exitfuncs()")
    assert ended.returncode == 0
    assert len(NAMED.findall(ended.stderr)) == 25


def test_the_main_process_asks_and_waits_for_the_answer(
    fresh: FreshProcesses, tmp_path: Path
) -> None:
    (tmp_path / "the-server-ends").touch()
    code = """
pid_file = farewell.Path(os.environ[farewell.FOLDER_ENV], f"{os.getpid()}.pid")
print(pid_file.exists())
hooks.after_idle(None, None)
print(pid_file.exists())
"""
    ended = fresh.run(PREPARE + code, env={module.FOLDER_ENV: str(tmp_path)})
    assert ended.stdout.split() == ["True", "False"]
    assert len(NAMED.findall(ended.stderr)) == 25


# In the main process


def test_asking_ends_when_the_last_process_has_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    attending = Farewell(lambda: said.append(1), tmp_path)
    asking = threading.Thread(target=ask_for_farewell, args=([tmp_path], 60.0))
    asking.start()
    deadline = time.monotonic() + 30
    while not said and time.monotonic() < deadline:
        attending.attend()
    asking.join(30)
    assert said == [1]
    assert not asking.is_alive()
    assert not caplog.text
    attending.attend()
    assert said == [1]


def test_a_process_that_does_not_answer_is_not_waited_for_ever_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{os.getpid()}.pid").touch()
    ask_for_farewell([tmp_path], 0.05)
    assert f"no answer within 0.05 s from the scheduler processes {os.getpid()}," in caplog.text


def test_a_folder_that_cannot_be_written_does_not_stop_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system without room, which a test cannot have."""

    def touch(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / f"{os.getpid()}.pid").touch()
    monkeypatch.setattr(Path, "touch", touch)
    monkeypatch.setitem(context.farewell_folders, os.getpid(), [tmp_path])
    module._before_kill(None)
    assert "cannot ask for findings that wait" in caplog.text
    assert not tmp_path.exists()


def test_a_dead_process_is_not_waited_for(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    while module._is_running(tmp_path / f"{process.pid}.pid"):  # until it is a zombie
        time.sleep(0.01)
    (tmp_path / f"{process.pid}.pid").touch()
    began = time.monotonic()
    ask_for_farewell([tmp_path], 60.0)
    process.wait()
    assert time.monotonic() - began < 60


def test_only_the_process_that_started_the_server_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(context.farewell_folders, os.getppid(), [tmp_path])
    module._before_kill(os.getpid(), include_parent=True)
    monkeypatch.setitem(context.farewell_folders, os.getpid(), [tmp_path])
    module._before_kill(parent_pid=os.getppid())  # another tree
    assert not (tmp_path / module._NOTE).exists()
    module._before_kill(os.getpid(), include_parent=False)
    assert not tmp_path.exists()


def test_last_words_are_said_once_and_only_where_the_own_tree_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(LAST_WORDS_ENV, "")  # restored at the end, as callers of Engine may do
        last_words._before_launch(None, SimpleNamespace(kv_canary="raise"))
    (path,) = context.last_words[os.getpid()]
    path.write_text("the violation")
    last_words._before_kill(os.getppid())  # another tree
    assert capsys.readouterr().err == ""
    for _ in range(2):
        last_words._before_kill(os.getpid(), include_parent=False)
    assert capsys.readouterr().err.count("the violation") == 1
    assert not path.exists()


def test_the_end_of_one_engine_hears_all_of_this_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Engine.shutdown` kills the children of its process, whichever engine launched them."""
    said: list[int] = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setenv(LAST_WORDS_ENV, "")
            patch.setenv(module.FOLDER_ENV, "")
            for part in (last_words, module):
                part._before_launch(None, SimpleNamespace(kv_canary="raise"))
    folders = context.farewell_folders[os.getpid()]
    schedulers = [Farewell(partial(said.append, n), folder) for n, folder in enumerate(folders)]
    context.last_words[os.getpid()][0].write_text("the first engine's violation")
    asking = threading.Thread(target=module._before_kill, args=(None,))
    asking.start()
    deadline = time.monotonic() + 30
    while asking.is_alive() and time.monotonic() < deadline:
        for scheduler in schedulers:
            scheduler.attend()
    asking.join(30)
    last_words._before_kill(None)
    assert sorted(said) == [0, 1]
    assert "the first engine's violation" in capsys.readouterr().err
    with pytest.raises(CanaryViolationError, match="the first engine's violation"):
        last_words._after_shutdown(None, None)
    assert not any(folder.exists() for folder in folders)


def test_a_server_that_does_not_raise_has_no_last_words() -> None:
    last_words._before_launch(None, SimpleNamespace(kv_canary="log"))
    assert context.last_words == {}


def test_an_environment_that_is_restored_after_the_launch_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(module.FOLDER_ENV, "")  # restored at the end, as callers of Engine may do
        module._before_launch(None, SimpleNamespace(kv_canary="log"))
        folder = Path(os.environ[module.FOLDER_ENV])
    assert folder.is_dir()
    assert module.FOLDER_ENV not in os.environ
    module._before_kill(os.getpid(), include_parent=False)
    assert not folder.exists()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
