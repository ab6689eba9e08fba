"""The command line: help, what it says without SGLang, tables that the README repeats, and the demo."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sglang.srt.kv_canary as package
from sglang.srt.kv_canary.cli import COMMANDS, main
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kv_canary import consts

register_cpu_ci(est_time=45, suite="stage-a-test-cpu")

ROOT = Path(__file__).parents[3]


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^    {command.name} ", shown, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("argv", [[], ["no-such-command"]], ids=str)
def test_without_a_command_says_which_there_are(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_settings_name_every_flag_and_variable(capsys):
    assert main(["settings"]) == 0
    shown = capsys.readouterr().out
    assert "--kv-canary-sweep-interval" in shown
    assert "SGLANG_KV_CANARY_EVENT_FILE" in shown


def test_without_sglang_says_what_to_install(tmp_path):
    folder = tmp_path / "sglang" / "srt" / "kv_canary"
    shutil.copytree(Path(package.__file__).parent, folder)
    run = f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['kv_canary', 'pools']; "
    run += "runpy.run_module('sglang.srt.kv_canary', run_name='__main__', alter_sys=True)"
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", run],
        capture_output=True,
        text=True,
        timeout=consts.PROCESS_TIMEOUT_S,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "install sglang==0.5.12.post1" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(
    not (ROOT / "README.md").exists(), reason="no source tree: README.md is not here"
)
def test_readme_tables_are_current(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["readme_tables.py", "--check"])
    monkeypatch.setenv("COLUMNS", "120")  # the tool sets it; this puts it back
    tool = runpy.run_path(str(ROOT / "tools/readme_tables.py"))
    assert tool["main"]() == 0, "run: .venv/bin/python tools/readme_tables.py"


def test_demo_catches_its_faults_and_exits_with_0():
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang.srt.kv_canary", "demo", "--requests", "40"],
        capture_output=True,
        text=True,
        timeout=consts.PROCESS_TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    last = ended.stdout.rstrip().splitlines()[-1]
    pattern = r"kv-canary demo: caught (\d+) of \1 injected faults, 0 false alarms in \d{4,} checked slots"
    assert re.fullmatch(pattern, last), ended.stdout


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
