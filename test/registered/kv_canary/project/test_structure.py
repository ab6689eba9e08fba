"""The floor plan: imports go one way between rooms and between files, and stay inside the package by relative names."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import sglang_kv_canary
import sglang_kv_canary_rigs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.checkout import REPO
from sglang_kv_canary_rigs.on_releases import is_from_0_5_22

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

PACKAGE = Path(sglang_kv_canary.__path__[0])
OWN_NAMES = (
    sglang_kv_canary.__name__,
    sglang_kv_canary_rigs.__name__,
    "sglang_kv_canary",
    "sglang_kv_canary_rigs",
)
# Packages that SGLang brings itself from 0.5.13 on. Only its seam may be named, as a target of a hook.
THEIRS = re.compile(r"\bsglang\.(srt|test|kernels\.ops)\.kv_canary\b[.\w]*")
SEAM = "sglang.srt.kv_canary.api.install_canary"
# They give this package its second name. Beside such a release they are not used, or come after SGLang's packages.
ALIASES = {
    "python/sglang/srt/kv_canary/import_alias.py",
    "python/sglang_kv_canary.py",
    "python/sglang_kv_canary_rigs.py",
}

Module = tuple[str, ...]


def _modules() -> dict[Module, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[parts[:-1] if parts[-1] == "__init__" else parts] = path
    return found


MODULES = _modules()


def _imports(module: Module) -> Iterator[Module]:
    """Modules of the package that `module` imports, also inside of functions and for types only."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                target = (*base, alias.name)
                yield target if target in MODULES else base


def _assert_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"imports in a circle: {' <- '.join(error.args[1])}") from None


def test_no_file_imports_itself_through_others():
    graph = {
        ".".join(module): {".".join(target) for target in _imports(module) if target != module}
        for module in MODULES
        if module
    }
    assert len(graph) > 100
    _assert_no_cycle(graph)


def test_no_room_imports_itself_through_others():
    """A folder is a room; a file at the top of the package is a room of its own."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        for target in _imports(module):
            if module[:1] != target[:1]:
                graph.setdefault(module[0], set()).add(target[0])
    assert graph["wiring"] >= {"runner", "reports"}
    _assert_no_cycle(graph)


@pytest.mark.parametrize("module", MODULES, ids=".".join)
def test_the_package_imports_itself_by_relative_names_and_never_its_tests(module):
    path = MODULES[module]
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        ours = [n for n in names for own in OWN_NAMES if n == own or n.startswith(f"{own}.")]
        # `kv-canary` and `python -m` share the command outside of the package.
        assert ours == [], f"{path}:{node.lineno}"


def _names_of_theirs(source: str) -> list[str]:
    """In imports, and in strings other than docstrings: code of snippets, hook targets, arguments of import_module."""
    return [match[0] for text in _texts(ast.parse(source)) for match in THEIRS.finditer(text)]


def _texts(tree: ast.Module) -> Iterator[str]:
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and node not in docstrings and node.value != SEAM:
            yield str(node.value)


@pytest.mark.skipif(not (REPO / "setup.py").is_file(), reason="no source tree")
def test_nothing_loads_a_canary_of_sglang_by_its_name():
    folders = [REPO / name for name in ("benchmark", "python", "test", "tools")]
    files = [REPO / "setup.py", *(path for folder in folders for path in folder.rglob("*.py"))]
    named = {
        path.relative_to(REPO).as_posix(): _names_of_theirs(path.read_text()) for path in files
    }
    assert len(named) > 300
    assert {file: names for file, names in named.items() if names and file not in ALIASES} == {}
    assert all(named[file] for file in ALIASES)


SRT, OPS = "sglang.srt", "sglang.kernels.ops"


@pytest.mark.parametrize(
    "source",
    [
        f"import {SRT}.kv_canary",
        f"def f():\n    from {SRT}.kv_canary.api import install_canary",
        f"from {SRT} import environ, kv_canary",
        f"from {OPS} import kv_canary",
        f"import_module('{OPS}.kv_canary.anything')",
        f"run('import sys; import {SRT}.kv_canary.config as config')",
        f"hook('{SEAM}_of_another_kind')",
    ],
)
def test_each_way_to_load_it_is_seen(source):
    assert len(_names_of_theirs(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        f"hook('{SEAM}')",
        f"'A docstring about {SRT}.kv_canary.'",
        "from .kv_canary import api",
        f"import {SRT}.kv_canary_of_others",
    ],
)
def test_nothing_else_is_seen(source):
    assert _names_of_theirs(source) == []


@pytest.mark.skipif(not (REPO / "setup.py").is_file(), reason="no source tree")
def test_nothing_lies_in_a_folder_that_is_named_like_an_option():
    """A script that takes a folder has been called with `--help`."""
    assert [path.name for path in REPO.iterdir() if path.name.startswith("-")] == []


@pytest.mark.parametrize(
    ("family", "runs"),
    [
        ("v0_5_12", False),
        ("v0_5_17", False),
        ("v0_5_18", False),
        ("v0_5_19", False),
        ("v0_5_20", False),
        ("v0_5_21", False),
        ("v0_5_22", True),
    ],
)
def test_what_is_covered_from_0_5_22_on_is_skipped_on_earlier_releases(family, runs):
    tested = import_module(f"{sglang_kv_canary.__name__}.wiring.{family}").RELEASE
    assert is_from_0_5_22(tested) is runs


# A file that the first release skips as a whole
FOR_NEWER_RELEASES = re.compile(
    r"^if not release\(\)\.has_own_canary\b.*:\n(?: .*\n)*? .*allow_module_level", re.M
)


def test_what_is_for_newer_releases_is_collected_there():
    """Files outside of the list are passed over on newer releases, unless they are named."""
    tests = Path(__file__).parents[1]
    listed = (tests / "conftest.py").read_text()
    here = [path for path in tests.rglob("test_*.py") if path != Path(__file__)]
    texts = {path.relative_to(tests).as_posix(): path.read_text() for path in here}
    names = [n for n, t in texts.items() if "@from_0_5_22" in t or FOR_NEWER_RELEASES.search(t)]
    assert {"e2e/test_e2e_dsv4_stages.py", "e2e/test_e2e_disaggregation_pause.py"} <= {*names}
    assert [name for name in names if f'"{name}"' not in listed] == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
