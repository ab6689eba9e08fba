"""A full run takes no fewer requests or examples than a quick one."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_kv_canary_rigs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs import volume as rig

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

FOLDERS = (Path(__file__).parents[1], Path(sglang_kv_canary_rigs.__path__[0]))


def _numbers(tree: ast.Module) -> Iterator[tuple[int, int, int]]:
    """The line of each call, and the numbers that it names. Wider steps of a slice take fewer, so these turn round."""
    steps = {n.step for n in ast.walk(tree) if isinstance(n, ast.Slice)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="volume"),
                args=[ast.Constant(value=int(quick)), ast.Constant(value=int(full)), *_],
            ):
                yield (node.lineno, full, quick) if node in steps else (node.lineno, quick, full)


def test_a_full_run_takes_no_fewer():
    paths = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))]
    sources = {path.name: text for path in paths if "volume(" in (text := path.read_text())}
    found = {name: list(_numbers(ast.parse(text))) for name, text in sources.items()}
    assert sum(map(len, found.values())) > 40
    wrong = [f"{name}:{line}" for name, calls in found.items() for line, q, f in calls if f < q]
    assert wrong == []


@pytest.mark.parametrize(
    ("full_volume", "on_gpu", "numbers"),
    [(False, False, (60, 60)), (True, False, (300, 300)), (True, True, (300, 15))],
)
def test_a_gpu_takes_what_is_said_for_it(
    full_volume: bool, on_gpu: bool, numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig, "FULL_VOLUME", full_volume)
    monkeypatch.setattr(rig, "_ON_GPU", on_gpu)
    assert (rig.volume(60, 300), rig.volume(60, 300, on_gpu=15)) == numbers
