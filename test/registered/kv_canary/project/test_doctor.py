"""`kv-canary doctor` says what a start would say, without a start."""

from __future__ import annotations

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.tiny_models import write_tiny_llama
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.fresh_process import FreshProcesses, SnippetOutcome

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

DOCTOR = """
import sys
from sglang_kv_canary.cli import sglang_problem
from sglang_kv_canary.cli.doctor import main
assert not sglang_problem()
sys.exit(main(sys.argv[1:]))
"""
ON = ("--kv-canary", "raise", "--kv-canary-real-data", "all", "--kv-canary-sweep-interval", "20")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return ("--model-path", write_tiny_llama(tmp_path_factory.mktemp("llama")), "--device", "cpu")


def _ask(*argv: str, **env: str) -> SnippetOutcome:
    return FreshProcesses().run(DOCTOR, *argv, env=env)


def _lines(outcome: SnippetOutcome, of: str) -> list[str]:
    return [line for line in outcome.stdout.splitlines() if line.split()[1] == of]


def _problems(outcome: SnippetOutcome) -> list[str]:
    return [line for line in outcome.stdout.splitlines() if line.startswith("PROBLEM")]


def test_without_arguments_it_checks_the_installation() -> None:
    outcome = _ask()
    assert outcome.returncode == 0, outcome.stderr
    assert [line.split()[1] for line in outcome.stdout.splitlines()] == [
        "release",
        "versions",
        "device",
        "hooks",
        "settings",
        "server",
    ]
    assert not _problems(outcome)


@pytest.mark.parametrize("flags", [(), ON], ids=["canary not asked for", "canary on"])
def test_arguments_that_can_be_protected_are_no_problem(
    served: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    outcome = _ask(*served, *flags)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert not _problems(outcome)
    assert "no argument is refused" in _lines(outcome, "server")[0]


def test_every_refusal_is_named_with_what_to_do(served: tuple[str, ...]) -> None:
    outcome = _ask(*served, *ON, "--enable-lmcache", "--enable-torch-compile")
    assert outcome.returncode == 1
    first, second = _problems(outcome)
    assert "LMCache" in first
    assert "Remove --enable-lmcache." in first
    assert "Remove --enable-torch-compile." in second


def test_a_wrong_setting_is_a_problem(served: tuple[str, ...]) -> None:
    outcome = _ask(*served, *ON, SGLANG_KV_CANARY_RING_CAPACITY="many")
    assert outcome.returncode == 1
    (problem,) = _problems(outcome)
    assert "SGLANG_KV_CANARY_RING_CAPACITY='many'" in problem


def test_a_setting_is_listed(served: tuple[str, ...]) -> None:
    outcome = _ask(*served, *ON, SGLANG_KV_CANARY_RING_CAPACITY="99")
    assert outcome.returncode == 0
    assert "SGLANG_KV_CANARY_RING_CAPACITY" in _lines(outcome, "settings")[0]


def test_arguments_that_sglang_refuses_are_a_problem(served: tuple[str, ...]) -> None:
    outcome = _ask(*served, "--no-such-flag")
    assert outcome.returncode == 1
    (problem,) = _problems(outcome)
    assert "SGLang refuses these arguments" in problem
    assert "--no-such-flag" in problem


def test_a_plugin_that_sglang_does_not_load_is_a_problem(served: tuple[str, ...]) -> None:
    outcome = _ask(*served, *ON, SGLANG_PLUGINS="another")
    assert outcome.returncode == 1
    (problem,) = _problems(outcome)
    assert "SGLANG_PLUGINS='another' must name kv_canary" in problem


@pytest.mark.skipif(not release().has_own_canary, reason="needs a release with a canary of its own")
def test_sglangs_own_canary_in_charge_is_a_problem(served: tuple[str, ...]) -> None:
    outcome = _ask(*served, SGLANG_KV_CANARY_USE_BUILTIN="1")
    assert outcome.returncode == 1
    assert "SGLANG_KV_CANARY_USE_BUILTIN" in _problems(outcome)[0]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
