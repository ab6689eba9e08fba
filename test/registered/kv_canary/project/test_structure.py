"""The floor plan: imports go one way between rooms and between files, and stay inside the package by relative names."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import sglang_kv_canary
import sglang_kv_canary_rigs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

PACKAGE = Path(sglang_kv_canary.__path__[0])
OWN_NAMES = (
    sglang_kv_canary.__name__,
    sglang_kv_canary_rigs.__name__,
    "sglang_kv_canary",
    "sglang_kv_canary_rigs",
)
# Names SGLang's files only in texts about them, and asks where the package could be imported from.
BY_FULL_NAME = {"wiring/version_check.py"}

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
    if path.relative_to(PACKAGE).as_posix() in BY_FULL_NAME:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        ours = [n for n in names for own in OWN_NAMES if n == own or n.startswith(f"{own}.")]
        # `kv-canary` and `python -m` share the command outside of the package.
        assert ours == [], f"{path}:{node.lineno}"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
