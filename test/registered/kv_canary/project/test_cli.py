"""The command line: help, what it says without SGLang, tables that the documents repeat, and the demo."""

import fcntl
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from io import BytesIO, TextIOWrapper
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest

import kv_canary_cli
import sglang_kv_canary as package
from kv_canary_cli import COMMANDS, main
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary_rigs.checkout import REPO
from sglang_kv_canary_rigs.event_folder import write_folder
from sglang_kv_canary_rigs.warm import shared

register_cpu_ci(est_time=45, suite="stage-a-test-cpu")


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(
        re.search(rf"^    {command.name}(?: |$)", shown, re.MULTILINE) for command in COMMANDS
    )


def test_without_a_command_shows_the_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(
        re.search(rf"^    {command.name}(?: |$)", shown, re.MULTILINE) for command in COMMANDS
    )


@pytest.mark.parametrize("argv", [["no-such-command"], ["--no-such-option"]], ids=str)
def test_unknown_argument_is_named(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_every_command_has_a_module():
    modules = (import_module(f"{package.__name__}.{command.module}") for command in COMMANDS)
    assert all(callable(module.main) for module in modules)


@pytest.mark.parametrize("argv", [[], ["--help"], ["--version"]], ids=str)
def test_first_answers_need_no_sglang_and_warn_of_nothing(argv):
    """Python names each module that it imports on stderr."""
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-W", "always", "-m", "kv_canary_cli", *argv],
        capture_output=True,
        text=True,
        timeout=consts.PROCESS_TIMEOUT_S,
    )
    assert ended.returncode == 0
    assert "kv-canary" in ended.stdout
    lines = ended.stderr.splitlines()
    assert [line for line in lines if not line.startswith("import time:")] == []
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "argparse" in imported
    assert not imported & {"sglang", "torch", "numpy", "triton"}


def test_version_names_both_distributions(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == (
        f"kv-canary {version('sglang-kv-canary')}, sglang {version('sglang')}\n"
    )


@pytest.mark.parametrize("name", sorted({package.__name__, "sglang_kv_canary"}))
def test_module_of_the_package_is_the_same_command(name):
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        command = _forked(name, "--version", stdout=out, stderr=err)
        code = command.wait(consts.PROCESS_TIMEOUT_S)
        shown, said = (file.seek(0) or file.read() for file in (out, err))
    assert code == 0, said
    assert shown.startswith("kv-canary ")


def test_settings_name_every_flag_and_variable(capsys):
    assert main(["settings"]) == 0
    shown = capsys.readouterr().out
    assert "--kv-canary-sweep-interval" in shown
    assert "SGLANG_KV_CANARY_EVENT_FILE" in shown
    assert "SGLANG_KV_CANARY_USE_BUILTIN" in shown


# What a shell does with the command


def _start(*argv: str, stdout: int, **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "kv_canary_cli", *argv],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | variables,
    )


def _forked(module: str, *argv: str, stdout: IO, stderr: IO) -> Any:
    """As a fresh process of `python -m MODULE`, with SGLang imported already: that takes 10 s."""
    # A shell ignores Ctrl-C for what it starts in the background, and tests inherit that.
    run = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    run += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-W", "ignore", "-c", run, *argv]
    return shared().popen(command, stdout=stdout, stderr=stderr, env=os.environ)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_the_command_quietly(unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = _start("--help", stdout=write, PYTHONUNBUFFERED=unbuffered)
    os.close(write)
    _, said = command.communicate(timeout=consts.PROCESS_TIMEOUT_S)
    assert command.returncode == 128 + signal.SIGPIPE
    assert said == b""


def test_a_closed_pipe_ends_a_command_with_sglang_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as out, TemporaryFile() as err:
        command = _forked("kv_canary_cli", "settings", stdout=out, stderr=err)
        assert command.wait(consts.PROCESS_TIMEOUT_S) == 128 + signal.SIGPIPE
        assert err.seek(0) or err.read() == b""


def test_a_full_disk_is_said_in_one_line() -> None:
    with open("/dev/full", "wb") as full:
        command = _start("--help", stdout=full.fileno())
        _, said = command.communicate(timeout=consts.PROCESS_TIMEOUT_S)
    assert command.returncode == 1
    (line,) = said.decode().splitlines()
    assert line.startswith("kv-canary: cannot write the answer: ")
    assert "No space left on device" in line


def test_an_interrupt_ends_the_command_quietly() -> None:
    """It comes while the command waits for somebody to read the rest."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    with TemporaryFile() as err:
        with os.fdopen(write, "wb", buffering=0) as out:
            command = _forked("kv_canary_cli", "settings", stdout=out, stderr=err)
        assert os.read(read, 1)
        os.kill(command.pid, signal.SIGINT)
        assert command.wait(consts.PROCESS_TIMEOUT_S) == 128 + signal.SIGINT
        os.close(read)
        assert err.seek(0) or err.read() == b""


def test_characters_that_the_terminal_lacks_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "\u6f22.jsonl"
    events.write_text('{"event": "\u6f22"}\n')
    shown = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(shown, "latin-1"))
    main(["report", "--text", str(events)])
    assert "\\u6f22" in shown.getvalue().decode("latin-1")


def _bare(folder: Path, name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """`kv-canary *argv` with the package in `folder` under `name`, in a Python that has no library at all."""
    shutil.copytree(Path(package.__file__).parent, folder.joinpath(*name.split(".")))
    shutil.copy(kv_canary_cli.__file__, folder)
    run = f"import sys, runpy; sys.path.insert(0, {str(folder)!r}); sys.argv = ['kv_canary', *{argv}]; "
    run += f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", run],
        capture_output=True,
        text=True,
        timeout=consts.PROCESS_TIMEOUT_S,
    )


def test_without_sglang_says_what_to_install(tmp_path: Path) -> None:
    ended = _bare(tmp_path, package.__name__, "pools")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "install sglang-kv-canary[sglang]" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_event_files_are_read_where_neither_sglang_nor_torch_is(tmp_path: Path) -> None:
    events, here, there = (tmp_path / name for name in ("events", "here.txt", "there.txt"))
    write_folder(events)
    assert main(["report", "--text", str(events), "-o", str(here)]) == 0
    argv = ("report", "--text", str(events), "-o", str(there))
    ended = _bare(tmp_path, "sglang_kv_canary", *argv)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "2 causes" in there.read_text()
    assert there.read_text() == here.read_text()


@pytest.mark.skipif(not (REPO / "docs").is_dir(), reason="no source tree: docs/ is not here")
def test_tables_of_the_documents_are_current(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["doc_tables.py", "--check"])
    tool = runpy.run_path(str(REPO / "tools/doc_tables.py"))
    assert tool["main"]() == 0, "run: .venv/bin/python tools/doc_tables.py"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
