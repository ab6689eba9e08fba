"""Tests that take turns in `.ci/run`: none of them is forgotten, and `make test` alone runs all."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.by_turns import (
    EVERY_SECOND_RUN,
    ON_EITHER_RELEASE,
    TURN,
    leave_to_the_next_run,
    turn,
    waits,
)

register_cpu_ci(est_time=1, suite="stage-a-test-cpu")

FOLDER = Path(__file__).parents[1]
BOTH = (False, True)
# Marks of classes that not every release runs.
OF_ONE_RELEASE = {
    "by_default_on_newer_releases",
    "from_0_5_22",
    "long_on_newer_releases",
    "refused_on_newer_releases",
}


@dataclass(frozen=True)
class Item:
    """Of pytest's, what is asked."""

    nodeid: str


def definition_of(name: str) -> ast.stmt | None:
    """The class or function of a name. None: the name is a file."""
    path, _, inner = name.partition("::")
    tree = ast.parse((FOLDER / path).read_text())
    if not inner:
        return None
    (found,) = [
        statement
        for statement in tree.body
        if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == inner
    ]
    return found


@pytest.mark.parametrize("name", [*ON_EITHER_RELEASE, *EVERY_SECOND_RUN])
def test_there_is_such_a_test(name: str) -> None:
    assert [*ON_EITHER_RELEASE, *EVERY_SECOND_RUN].count(name) == 1
    definition_of(name)


@pytest.mark.parametrize("name", ON_EITHER_RELEASE)
def test_each_run_has_it_on_one_release(name: str) -> None:
    path = name.partition("::")[0]
    assert f'"{path}",' in (FOLDER / "conftest.py").read_text(), "not in ON_NEWER_RELEASES"
    marks = getattr(definition_of(name), "decorator_list", [])
    assert not {ast.unparse(mark) for mark in marks} & OF_ONE_RELEASE
    for of_turn in (0, 1):
        assert [waits(name, of_turn, newer) for newer in BOTH].count(True) == 1


@pytest.mark.parametrize("name", EVERY_SECOND_RUN)
def test_every_second_run_has_it(name: str) -> None:
    for newer in BOTH:
        assert [waits(name, of_turn, newer) for of_turn in (0, 1)].count(True) == 1


@pytest.mark.parametrize("rest", ["", "::test_clean", "[K]"])
def test_a_name_holds_for_what_is_in_it(rest: str) -> None:
    name = EVERY_SECOND_RUN[-1]
    assert [waits(name + rest, of_turn, False) for of_turn in (0, 1)].count(True) == 1


def test_a_longer_name_is_another_one() -> None:
    name = EVERY_SECOND_RUN[-1]
    assert not any(waits(f"{name}Pages::test_clean", of_turn, False) for of_turn in (0, 1))


@pytest.mark.parametrize(("found", "expected"), [("", None), ("0", 0), ("1", 1)])
def test_the_turn_is_read(
    found: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TURN, found)
    assert turn() == expected


@pytest.mark.parametrize("found", ["2", "-1", "odd"])
def test_no_other_turn_is_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TURN, found)
    with pytest.raises(pytest.UsageError, match=f"'{found}': expected 0 or 1"):
        turn()


def test_pytest_leaves_out_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for pytest's configuration takes what is left out."""
    left_out: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    here = "test/registered/kv_canary/"
    items = [
        Item(f"{here}{name}::test_x")
        for name in (ON_EITHER_RELEASE[0], EVERY_SECOND_RUN[0], "e2e/test_another.py")
    ]
    every = list(items)
    monkeypatch.delenv(TURN, raising=False)
    leave_to_the_next_run(SimpleNamespace(hook=hook), items)
    assert (items, left_out) == (every, [])
    monkeypatch.setenv(TURN, "1")
    leave_to_the_next_run(SimpleNamespace(hook=hook), items)
    kept = [every[0], every[2]] if release().has_own_canary else [every[2]]
    assert items == kept
    assert left_out == [item for item in every if item not in kept]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
