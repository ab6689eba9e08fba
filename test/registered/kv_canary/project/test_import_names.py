"""The package and the rigs answer to two import names each, with one copy of every module."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import sglang_kv_canary
import sglang_kv_canary_rigs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.import_alias import OLD_NAME
from sglang_kv_canary.testing import consts

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


@pytest.mark.parametrize(
    ("alias", "package", "name"),
    [
        ("sglang_kv_canary", sglang_kv_canary, "kernels.reference.check"),
        ("sglang_kv_canary_rigs", sglang_kv_canary_rigs, "oracle"),
    ],
)
def test_both_names_give_the_same_module(alias, package, name):
    by_alias = import_module(f"{alias}.{name}")
    assert by_alias is import_module(f"{package.__name__}.{name}")
    # Relative imports, pickles and `python -m` go by these.
    assert by_alias.__spec__.name == by_alias.__name__ == f"{package.__name__}.{name}"
    assert by_alias.__spec__.loader is by_alias.__loader__


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"no_such_module"):
        import_module("sglang_kv_canary.no_such_module")


# The old name beside the wheel, with stubs for SGLang


Wheel = Callable[..., Any]


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """`wheel(code, *argv)` runs `code` where the package lies as the wheel installs it; gives what it printed."""
    shutil.copytree(sglang_kv_canary.__path__[0], tmp_path / "sglang_kv_canary")
    shutil.copy(import_module("kv_canary_cli").__file__, tmp_path)
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    for folder in ("sglang", "sglang/srt"):
        (tmp_path / folder / "__init__.py").touch()

    def run(code: str, *argv: str) -> Any:
        start = f"import sys, json; sys.path.insert(0, {str(tmp_path)!r})\n"
        start += "import sglang_kv_canary.import_alias as alias; alias.offer_old_name()\n"
        ended = subprocess.run(
            [sys.executable, "-I", "-S", "-c", start + code, *argv],
            capture_output=True,
            text=True,
            timeout=consts.PROCESS_TIMEOUT_S,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize("names", [(OLD_NAME, "sglang_kv_canary"), ("sglang_kv_canary", OLD_NAME)])
def test_old_name_is_the_same_package_whichever_comes_first(names, wheel):
    found = wheel(
        """
from importlib import import_module
parts = ("", ".errors", ".cli", ".wiring.version_check")
pairs = [[import_module(name + part) for name in sys.argv[1:]] for part in parts]
print(json.dumps([[a is b, a.__name__, a.__spec__.name] for a, b in pairs]))
        """,
        *names,
    )
    names = [f"sglang_kv_canary{part}" for part in ("", ".errors", ".cli", ".wiring.version_check")]
    assert found == [[True, name, name] for name in names]


def test_asking_where_the_old_name_is_imports_nothing(wheel):
    found = wheel(
        f"""
from importlib.util import find_spec
find_spec({OLD_NAME!r})
print(json.dumps([name for name in sys.modules if "kv_canary" in name]))
        """
    )
    assert found == ["sglang_kv_canary", "sglang_kv_canary.import_alias"]


def test_a_package_of_that_name_in_sglang_is_left_alone(wheel, tmp_path):
    """Modules that it lacks, and that we have, stay missing."""
    theirs = tmp_path / "sglang" / "srt" / "kv_canary"
    theirs.mkdir()
    (theirs / "__init__.py").touch()
    found = wheel(
        f"""
from importlib import import_module
try:
    import_module("{OLD_NAME}.errors")
except ModuleNotFoundError as error:
    missing = error.name
print(json.dumps([missing, sys.modules[{OLD_NAME!r}].__file__]))
        """
    )
    assert found == [f"{OLD_NAME}.errors", str(theirs / "__init__.py")]


def test_old_name_is_offered_once_and_after_all_others(wheel):
    """An interpreter of a virtual environment reads each .pth file twice."""
    kinds = wheel(
        "alias.offer_old_name(); print(json.dumps([type(f).__name__ for f in sys.meta_path]))"
    )
    assert kinds.count("_Offer") == 1
    assert kinds[-1] == "_Offer"


@pytest.mark.parametrize("module", ["sglang_kv_canary", OLD_NAME])
def test_command_is_a_module_under_both_names(module, wheel):
    found = wheel(
        """
import contextlib, io, runpy
sys.argv[1:], module = ["--version"], sys.argv[1]
shown = io.StringIO()
try:
    with contextlib.redirect_stdout(shown):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as end:
    print(json.dumps([end.code, shown.getvalue().split()[0]]))
        """,
        module,
    )
    assert found == [0, "kv-canary"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
