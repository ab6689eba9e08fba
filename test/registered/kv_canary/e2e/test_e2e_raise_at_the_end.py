"""RAISE in a Python process: damage that only the last request reads fails the program that shuts its engine down.

The answer is there before the finding is. A program that checks its answers and ends would be green.
"""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary_rigs.warm import shared

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

PROGRAM = """
import random, sys
from sglang_kv_canary.testing import MODES
from sglang_kv_canary.testing.serving import CanaryEngine
from sglang_kv_canary.testing.traffic import random_tokens

if __name__ == "__main__":
    serving = CanaryEngine(MODES["mha"], {"kv_canary": "raise", "kv_canary_real_data": "all"})
    prompt = random_tokens(random.Random("prompt"), 60)
    serving.__enter__()
    assert serving.run(serving.generate("writer", prompt, 4))
    if sys.argv[2] == "damaged":
        serving.send("flip_bytes", cached=prompt, position=10).answer()
    assert serving.run(serving.generate("reader", [*prompt, 7], 1))
    if sys.argv[1] == "shutdown":
        serving.engine.shutdown()
    print("green")
"""


def run(how: str, state: str, folder: Path) -> tuple[int, str, str]:
    out, err = folder / "out", folder / "err"
    command = [sys.executable, "-W", "ignore", "-c", dedent(PROGRAM), how, state]
    with out.open("w") as stdout, err.open("w") as stderr:
        process = shared().popen(command, stdout=stdout, stderr=stderr, env=dict(os.environ))
        try:
            code = process.wait(consts.PROCESS_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, 9)
            raise
    return code, out.read_text(), err.read_text()


def test_a_shutdown_raises_what_the_last_request_has_found(tmp_path: Path) -> None:
    code, out, err = run("shutdown", "damaged", tmp_path)
    assert (code, out) == (1, "")
    assert "CanaryViolationError: kv_canary violation: launch_tag=" in err


def test_the_exit_of_the_interpreter_is_no_success(tmp_path: Path) -> None:
    code, out, err = run("exit", "damaged", tmp_path)
    assert (code, out) == (1, "green\n")
    assert "kv-canary violation #1: CONTENT at TAIL_K_FULL" in err


@pytest.mark.parametrize("how", ["shutdown", "exit"])
def test_without_damage_it_is_a_success(how: str, tmp_path: Path) -> None:
    code, out, err = run(how, "whole", tmp_path)
    assert (code, out) == (0, "green\n"), err


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
