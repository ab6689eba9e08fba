"""Wrong settings end a command line in one line, before anything is launched. Programs get the exception."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.seam_guard import BUILTIN_ENV
from sglang_kv_canary.testing.tiny_models import write_tiny_llama
from sglang_kv_canary_rigs.fresh_process import FreshProcesses, SnippetOutcome

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

PREFIX = "SGLANG_KV_CANARY_"
ON = ("--kv-canary", "log")
CPU = {"device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": 0.8}
OVER_ASCEND = "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "ascend"
BAD = f"{PREFIX}RING_CAPACITY"

# Name -> (flags, variables, what the line names)
WRONG = {
    "value": (ON, {BAD: "0"}, f"{BAD}='0' is refused"),
    "number": (ON, {BAD: "9" * 40}, "expected a whole number from 1 to 1048576"),
    "flag as a variable": (ON, {PREFIX[:-1]: "raise"}, "did you mean the flag --kv-canary?"),
    "variable": (ON, {f"{PREFIX}RINGS": "1"}, f"{PREFIX}RINGS='1' is refused"),
    "word": (ON, {BUILTIN_ENV: "maybe"}, f"{BUILTIN_ENV}='maybe' is refused"),
    "flag without another": (("--kv-canary-real-data", "all"), {}, "given without --kv-canary"),
    "setup": ((*ON, *OVER_ASCEND), {}, "cannot protect this server"),
}

LAUNCH = """
import runpy, sys
runpy.run_module("sglang.launch_server", run_name="__main__")
"""
READ = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang_kv_canary.errors import CanaryConfigError
def outcome(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except CanaryConfigError as error:
        return str(error)
    return "made"
def check(server_args):
    getattr(server_args, "resolve_once", lambda: None)()
    server_args.check_server_args()
"""
CHECK = """
server_args = prepare_server_args(sys.argv[1:])
check(server_args)
print(json.dumps(server_args.kv_canary))
"""
MAKE = """
from sglang import Engine
given = json.loads(sys.argv[1])
print(json.dumps([outcome(ServerArgs, **given), outcome(Engine, **given)]))
"""
# A program that reads a command line, and makes an engine of its own then.
READ_BEFORE = """
prepare_server_args(sys.argv[2:])
os.environ["SGLANG_KV_CANARY_RING_CAPACITY"] = "0"
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def command_line(llama: str) -> Callable[..., SnippetOutcome]:
    fresh = FreshProcesses()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in CPU.items()]

    def run(code: str, *more: str, **variables: str) -> SnippetOutcome:
        return fresh.run(code, "--model-path", llama, *flags, *more, env=variables)

    return run


@pytest.mark.parametrize("case", WRONG)
def test_a_command_line_ends_in_one_line(case: str, command_line) -> None:
    flags, variables, named = WRONG[case]
    ended = command_line(LAUNCH, *flags, **variables)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if "canary" in line.lower())
    assert line.startswith("sglang: error: ")
    assert named in line


def test_a_command_line_with_right_settings_goes_on(command_line) -> None:
    right = {BAD: "7", f"{PREFIX}SNAPSHOT_KV": "y", BUILTIN_ENV: "n"}
    assert command_line(READ + CHECK, *ON, **right).result == "log"
    assert command_line(READ + CHECK, **{BAD: "0"}).result == "none"


@pytest.fixture
def given(llama: str) -> str:
    return json.dumps({"model_path": llama, "kv_canary": "log", **CPU})


# From 0.5.20 on ServerArgs is a msgspec.Struct, which keeps the `__post_init__` that it was defined with.
CHECKS_ITS_VALUES = not hasattr(ServerArgs, "__struct_fields__")


@pytest.mark.parametrize(
    ("before", "argv", "variables"),
    [("", [], {BAD: "0"}), (READ_BEFORE, ["--model-path", "dummy", *ON], {})],
    ids=["alone", "behind a command line"],
)
def test_a_program_gets_the_exception(
    before: str, argv: list[str], variables: dict[str, str], given: str
) -> None:
    ended = FreshProcesses().run(READ + before + MAKE, given, *argv, env=variables)
    assert ended.returncode == 0, ended.stderr
    made, launched = ended.result
    assert f"{BAD}='0' is refused" in launched
    assert made == (launched if CHECKS_ITS_VALUES else "made")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
