"""The tool behind `make mutants`: what it changes, that the change takes effect, and that tests are asked about it."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mutation_testing.explained import as_row, explained_in, name_of
from mutation_testing.forks import ChildError, Died, in_forks
from mutation_testing.line_trace import LineTrace
from mutation_testing.mutant import LEAST_PER_FILE, Mutant, sample
from mutation_testing.mutators import mutants_of
from mutation_testing.swap import LiveFunctions, NotFoundError
from mutation_testing.targets import GPU_ONLY, TARGETS, TESTING_DOC, target_files
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

SOURCE = '''\
"""A module to be mutated."""
import functools
import logging

logger = logging.getLogger(__name__)


class Shop:
    OPEN, SHUT = 1, 2

    def __init__(self):
        self.sold = []

    def sell(self, age: int | None, price=3):
        if age is None or age < 18:
            raise ValueError(f"too young: {age - 1}")
        self.sold.append(price)
        logger.info("sold for %d", price + 1)
        return Shop.OPEN


@functools.cache
def state(number):
    return number & 0xF | Shop.SHUT
'''


@pytest.fixture
def shop(tmp_path: Path) -> ModuleType:
    path = tmp_path / "shop.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("shop_to_be_mutated", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _mutants(label: str) -> list[Mutant]:
    return [m for m in mutants_of(SOURCE, "shop.py") if m.label == label]


def test_what_is_changed() -> None:
    assert {m.label for m in mutants_of(SOURCE, "shop.py")} >= {
        "if age is None or age <= 18:",
        "if age is None or age < 19:",
        "if age is None and age < 18:",
        "without: age is None in: age is None or age < 18",
        "False for: age is None or age < 18",
        "without: self.sold.append(price)",
        'without: raise ValueError(f"too young: {age - 1}")',
        "return Shop.SHUT",
        "return (number & 0xF & Shop.SHUT)",
        "return number & 14 | Shop.SHUT",
        "return (number & 0xF)",
    }


def test_text_annotations_and_log_lines_are_not_changed() -> None:
    labels = [m.label for m in mutants_of(SOURCE, "shop.py")]
    assert not [
        label
        for label in labels
        if "logger" in label or ("too young" in label and "raise" not in label)
    ]
    assert not [label for label in labels if "def " in label]


def test_every_mutant_is_python_that_differs_from_its_source() -> None:
    for mutant in mutants_of(SOURCE, "shop.py"):
        assert ast.dump(ast.parse(mutant.apply(SOURCE))) != ast.dump(ast.parse(SOURCE))
        assert mutant.first_line < mutant.lines[0] <= mutant.lines[1]


def test_a_change_takes_effect_in_references_that_exist(shop: ModuleType) -> None:
    (mutant,) = _mutants("if age is None or age <= 18:")
    sell, live = shop.Shop().sell, LiveFunctions({"shop.py": Path(shop.__file__)})
    assert sell(18) == 1
    live.install(mutant)
    with pytest.raises(ValueError, match="too young"):
        sell(18)
    live.install_unchanged(mutant)
    assert sell(18) == 1


def test_what_the_function_has_cached_is_forgotten(shop: ModuleType) -> None:
    (mutant,) = _mutants("return (number & 0xF)")
    live = LiveFunctions({"shop.py": Path(shop.__file__)})
    assert shop.state(5) == 7
    live.install(mutant)
    assert shop.state(5) == 5


def test_a_function_that_is_not_there_is_no_survivor(shop: ModuleType) -> None:
    (mutant,) = _mutants("return (number & 0xF)")
    live = LiveFunctions({"shop.py": Path(shop.__file__)})
    with pytest.raises(NotFoundError):
        live._replace(mutant, "pass")


def test_the_lines_of_a_mutant_are_traced(shop: ModuleType) -> None:
    (mutant,) = _mutants("without: self.sold.append(price)")
    trace = LineTrace({shop.__file__: "shop.py"})
    with trace.running() as young, pytest.raises(ValueError, match="too young"):
        shop.Shop().sell(3)
    with trace.running() as old:
        shop.Shop().sell(30)
    assert mutant.lines[0] not in young["shop.py"]
    assert mutant.lines[0] in old["shop.py"]


def test_the_sample_is_the_same_for_the_same_seed() -> None:
    mutants = mutants_of(SOURCE, "shop.py")
    one, other = sample(mutants, 1, 8), sample(mutants, 2, 8)
    assert one == sample(mutants, 1, 8)
    assert one != other
    assert len(one) == len(set(one)) == 8


def test_the_sample_stays_when_another_function_is_added() -> None:
    longer = "def added(x):\n    return x + 1\n\n\n" + SOURCE
    names = [name_of(m) for m in sample(mutants_of(SOURCE, "shop.py"), 1, 8)]
    later = [name_of(m) for m in sample(mutants_of(longer, "shop.py"), 1, 8)]
    assert len(set(names) - set(later)) <= 2  # those that the new function's took the places of


def test_the_sample_has_some_of_each_file() -> None:
    both = mutants_of(SOURCE, "shop.py") + mutants_of(SOURCE, "other.py")
    chosen = sample(both, 1, 2 * LEAST_PER_FILE)
    assert [m.file for m in chosen].count("other.py") == LEAST_PER_FILE


def test_children_tell_what_they_found_or_how_they_died() -> None:
    def work(task: str) -> str:
        if task == "hangs":
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            signal.pause()
        if task == "crashes":
            os._exit(3)
        return task.upper()

    found = dict(in_forks(work, ["works", "hangs", "crashes"], jobs=2))
    assert found == {"works": "WORKS", "hangs": Died(-signal.SIGALRM), "crashes": Died(3)}
    assert found["hangs"].is_timeout
    assert not found["crashes"].is_timeout


def test_an_error_of_the_tool_is_no_verdict() -> None:
    with pytest.raises(ChildError, match="ZeroDivisionError"):
        list(in_forks(lambda task: 1 // task, [0], jobs=1))


def test_rows_of_the_table_are_read_as_they_are_written(tmp_path: Path) -> None:
    mutant = next(m for m in mutants_of(SOURCE, "shop.py") if "|" in m.label)
    document = tmp_path / "testing.md"
    rows = f"| a | b | c | d |\n| --- | --- | --- | --- |\n{as_row(mutant, 'why')}\n"
    document.write_text(f"# Text\n<!-- begin mutants -->\n{rows}<!-- end mutants -->\n")
    assert explained_in(document) == {name_of(mutant): "why"}


@pytest.fixture(scope="module")
def every_mutant() -> list[Mutant]:
    return [m for name, path in target_files().items() for m in mutants_of(path.read_text(), name)]


def test_explanations_are_of_mutants_that_exist(every_mutant: list[Mutant]) -> None:
    explained = explained_in(TESTING_DOC)
    assert set(explained) <= {name_of(mutant) for mutant in every_mutant}
    assert all(explained.values())


def test_what_is_left_out_for_want_of_a_gpu_exists(every_mutant: list[Mutant]) -> None:
    assert {mutant.file for mutant in every_mutant} == {Path(target).name for target in TARGETS}
    assert {mutant.function for mutant in every_mutant} >= GPU_ONLY


SESSION = """
import importlib.util, pathlib, sys
import pytest
from mutation_testing import runner
from mutation_testing.mutators import mutants_of

path = pathlib.Path("shop.py").resolve()
sys.path.insert(0, str(path.parent))
import shop
runner.CACHE = path.parent / "cache"
mutants = mutants_of(path.read_text(), "shop.py")

def work(session):
    session.trace()
    session.import_ahead()
    print("control", session.control(mutants))
    for verdict in session.verdicts(mutants):
        print(verdict.outcome, "|", verdict.mutant.label)

pytest.main(["-q", "-s", "-p", "no:cacheprovider", "test_shop.py"], [runner.TestRunner({"shop.py": path}, 2, 60, work)])
"""
TESTS = """
import pytest, shop

def test_old_enough():
    assert shop.Shop().sell(30) == 1

def test_too_young():
    with pytest.raises(ValueError):
        shop.Shop().sell(17)
"""


def _run_session(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "shop.py").write_text(SOURCE)
    (folder / "test_shop.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    tools = os.path.dirname(os.path.dirname(sys.modules["mutation_testing"].__file__))
    environ = {**os.environ, "PYTHONPATH": tools}
    command = [sys.executable, "-c", SESSION]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120
    )


def test_a_session_kills_what_its_tests_see(tmp_path: Path) -> None:
    ran = _run_session(tmp_path, TESTS)
    lines = ran.stdout.splitlines()
    assert "control 2" in lines, ran.stdout + ran.stderr
    assert "killed | False for: age is None or age < 18" in lines
    assert "killed | if age is None or age >= 18:" in lines
    assert "survived | if age is None or age <= 18:" in lines
    assert "not covered | return (number & 0xF)" in lines


def test_a_session_whose_tests_fail_by_themselves_is_refused(tmp_path: Path) -> None:
    ran = _run_session(
        tmp_path, TESTS + "\n\ndef test_wrong():\n    assert shop.Shop().sell(18) == 2\n"
    )
    assert "NotGreenError" in ran.stdout + ran.stderr
    assert "killed" not in ran.stdout


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
