"""What the documents give a reader to paste, as it stands: docs/walkthrough.md and the test of docs/develop.md."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.serving import free_server_port
from sglang_kv_canary_rigs.checkout import DOCS

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")

ACTIVATE = "source .venv/bin/activate\n"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="no source tree: docs/ is not here")


def commands() -> str:
    return "\n".join(
        re.findall(r"```bash\n(.*?)```", (DOCS / "walkthrough.md").read_text(), re.DOTALL)
    )


def run(script: str, folder: Path) -> str:
    """Its output, with the server's log; ends whatever it leaves behind."""
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    shell = subprocess.Popen(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        return shell.communicate(timeout=consts.PROCESS_TIMEOUT_S)[0]
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page's flags are those of a CPU machine")
def test_walkthrough_works_as_it_stands(tmp_path: Path) -> None:
    script = commands()
    assert script.startswith(ACTIVATE)
    port = str(free_server_port())
    script = script.removeprefix(ACTIVATE).replace("30000", port)
    out = run(f"set -e\n{script}wait\n", tmp_path)
    assert "kv-canary active: mode log" in out
    assert "fault injection is ON" in out
    assert '"detail": "flipped 1 byte(s) of K, layer 0, slot ' in out
    assert re.search(r"kv-canary violation #\d+: CONTENT at TAIL_K_FULL, slot ", out), out
    assert 'checked by request "cleo"' in out
    assert 'written by request "ada"' in out


def documented_test() -> type:
    """The class of docs/develop.md, from its text."""
    page = DOCS / "develop.md"
    (text,) = re.findall(r"```python\n(from .*?)```", page.read_text(), re.DOTALL)
    module: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, str(page), "exec"), module)
    (found,) = (value for name, value in module.items() if name.startswith("Test"))
    return found


if DOCS.is_dir():
    TestOfTheDocuments = documented_test()  # pytest collects and runs it as one of ours


def test_the_documented_class_has_tests() -> None:
    assert len([name for name in vars(TestOfTheDocuments) if name.startswith("test_")]) == 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
