"""`kv-canary selftest`: every check is among its checks, and a check that does not work is named."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
import triton

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.cli.selftest import main
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.kernels.reference import check, hashing
from sglang_kv_canary.record import Reason
from sglang_kv_canary.selftest import all_checks

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

CPU = ("--device", "cpu")


def _ask(capsys: pytest.CaptureFixture[str]) -> dict:
    """What it says in JSON; the exit code goes with it."""
    code = main([*CPU, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert code == int(not answer["ok"])
    return answer


def _failing(answer: dict) -> set[tuple[str, str]]:
    return {(c["check"], c["side"]) for c in answer["checks"] if not (c["fired"] and c["silent"])}


def test_every_reason_and_every_side_is_checked() -> None:
    checks = all_checks()
    assert {check.reason for check in checks} == set(Reason)
    sides = {tag.partition("_")[0] for check in checks for tag, _ in check.findings}
    assert sides == {"HEAD", "TAIL", "SWEEP", "FREE"}


def test_all_checks_work_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(CPU) == 0
    shown = capsys.readouterr().out
    assert f"{len(all_checks())} of {len(all_checks())} checks work" in shown
    assert " NO " not in shown
    assert "FAILED" not in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
def test_interpreted_kernels_are_tested_too(monkeypatch, capsys) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    answer = _ask(capsys)
    assert _failing(answer) == set()
    backends = [c["backend"] for c in answer["checks"]]
    assert backends.count("NumPy reference") == len(all_checks())
    assert backends.count("Triton kernels, interpreted") == len(all_checks())


def test_a_comparison_that_never_fails_is_named(monkeypatch, capsys) -> None:
    original = check._previous_chain

    def unknown(*args):
        previous, known = original(*args)
        return previous, np.zeros_like(known)

    monkeypatch.setattr(check, "_previous_chain", unknown)
    assert main(CPU) == 1
    shown = capsys.readouterr().out
    assert "FAILED  CHAIN at SWEEP, NumPy reference" in shown
    assert "a flipped bit in a record that no request reads: with the fault, expected" in shown
    assert "got nothing" in shown
    answer = _ask(capsys)
    # POSITION at HEAD and TAIL comes with CHAIN; a slot of a compressed pool has its own path.
    assert _failing(answer) == {("CHAIN", s) for s in ("HEAD+TAIL", "SWEEP", "HEAD")} | {
        ("POSITION", "HEAD+TAIL")
    }
    assert all(c["silent"] for c in answer["checks"])


def test_a_comparison_that_always_fails_is_a_false_alarm(monkeypatch, capsys) -> None:
    stored = hashing.stored_position
    monkeypatch.setattr(hashing, "stored_position", lambda identity: stored(identity) + 1)
    answer = _ask(capsys)
    (content,) = [
        c for c in answer["checks"] if c["check"] == "USE_AFTER_FREE" and c["side"] == "HEAD+TAIL"
    ]
    assert not content["silent"]
    assert "without the fault, expected nothing, got" in content["problem"]
    assert "POSITION at HEAD_K_FULL" in content["problem"]


def test_kernels_that_do_not_run_are_a_failure(monkeypatch, capsys) -> None:
    def broken(*args) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(reference, "check_list", broken)
    answer = _ask(capsys)
    assert {side for _, side in _failing(answer)} == {"SWEEP"}
    problem = next(c["problem"] for c in answer["checks"] if c["side"] == "SWEEP")
    assert "RuntimeError: no kernel image is available" in problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "--device cuda: torch" in capsys.readouterr().err


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
