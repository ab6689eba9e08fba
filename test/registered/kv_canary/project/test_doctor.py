"""`kv-canary doctor` says what a start would say, without a start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import triton

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.cli import doctor, machine
from sglang_kv_canary.testing.tiny_models import (
    write_tiny_deepseek_v2,
    write_tiny_gemma4,
    write_tiny_lfm2,
    write_tiny_llama,
    write_tiny_whisper,
)
from sglang_kv_canary.wiring.coverage import _ONLY_IF, paths
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
STEPS = (
    *("--speculative-num-steps", "2", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "3"),
)
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
        "drivers",
        "hooks",
        "settings",
        "server",
    ]
    assert not _problems(outcome)


def test_a_triton_that_takes_longer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "longer" not in doctor._versions().text
    monkeypatch.setattr(triton, "__version__", "9.1.0")
    assert "launches by Triton 9.1.0 take longer" in doctor._versions().text


def test_arguments_that_can_be_protected_are_no_problem(served: tuple[str, ...]) -> None:
    outcome = _ask(*served, *ON)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert not _problems(outcome)
    assert "no argument is refused" in _lines(outcome, "server")[0]


@pytest.mark.parametrize(
    ("write_model", "pool"),
    [
        (write_tiny_llama, "MHATokenToKVPool, FULL(K,V): K and V of every layer; "),
        (write_tiny_gemma4, "SWAKVPool, FULL(K,V) SWA(K,V): "),
        (write_tiny_deepseek_v2, "MLATokenToKVPool, FULL(K): latent rows of every layer; "),
    ],
    ids=["mha", "swa", "mla"],
)
def test_the_pools_of_the_model_are_named(write_model, pool: str, tmp_path: Path) -> None:
    # SGLang 0.5.17 accepts no Gemma 4 with the attention backend that it chooses on CPU.
    args = ("--model-path", write_model(tmp_path), "--device", "cpu", "--attention-backend")
    outcome = _ask(*args, "triton", *ON)
    (line,) = _lines(outcome, "pools")
    assert f"target model: {pool}" in line
    assert "records take at most" in line


def test_the_draft_models_pools_are_named_too(served: tuple[str, ...]) -> None:
    draft = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", served[1])
    outcome = _ask(*served, *draft, *STEPS)
    target, draft = _lines(outcome, "pools")
    assert "target model: MHATokenToKVPool" in target
    assert "draft model: MHATokenToKVPool" in draft


def test_only_the_paths_of_these_arguments_are_named(served: tuple[str, ...]) -> None:
    plain = " ".join(_lines(_ask(*served), "paths"))
    other = " ".join(_lines(_ask(*served, "--chunked-prefill-size", "-1", "--tp", "2"), "paths"))
    assert "decode" in plain
    assert "decode" in other
    assert "chunked prefill" in plain
    assert "chunked prefill" not in other
    assert "tensor parallelism" not in plain
    assert "tensor parallelism" in other


@pytest.mark.parametrize(
    ("write_model", "backend", "path"),
    [
        (write_tiny_lfm2, "torch_native", "states of linear-attention layers"),
        (write_tiny_gemma4, "triton", "sliding-window layers"),
    ],
)
def test_the_paths_of_the_model_are_named(
    write_model, backend: str, path: str, tmp_path: Path
) -> None:
    if path not in [each.name for each in paths()]:
        pytest.skip("no path of this release; lifted by make test SGLANG=0.5.23")
    model = ("--model-path", write_model(tmp_path), "--device", "cpu", "--attention-backend")
    assert path in " ".join(_lines(_ask(*model, backend, *ON), "paths"))


def test_no_path_is_partly_covered_that_the_server_does_not_take(served: tuple[str, ...]) -> None:
    """Each path needs an argument or a variable of its own."""
    plain = _lines(_ask(*served, "--kv-canary", "log"), "paths")
    assert len(plain) == 1, plain
    sweeping, ending = (
        "sweep of cached prefixes",
        "ending the readers of damage (SGLANG_KV_CANARY_ACTION)",
    )
    named = [path.name for path in paths()]
    flags = ("--kv-canary", "log", "--kv-canary-sweep-interval", "20")
    swept = _lines(_ask(*served, *flags, SGLANG_KV_CANARY_ACTION="abort"), "paths")
    shown = [line.partition("partly: ")[2] for line in swept[1:]]
    for name in (sweeping, ending):
        assert any(line.startswith(name) for line in shown) == (name in named)


@pytest.mark.skipif(release().has_own_canary, reason="newer releases have fewer paths")
def test_paths_that_need_an_argument_are_paths_of_the_table() -> None:
    other_releases = {
        "prefill CUDA graphs",
        "session radix cache",
        "sliding-window layers",
        "unified memory (--enable-unified-memory)",
    }
    assert set(_ONLY_IF) - {path.name for path in paths()} == other_releases


def test_a_driver_whose_gpu_torch_does_not_find_is_a_problem(monkeypatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    monkeypatch.setattr(machine, "_NVIDIA", version)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.driver().startswith("NVIDIA 570.86.15")
    found = doctor._drivers()
    assert found.is_problem == (not torch.cuda.is_available())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert not doctor._drivers().is_problem


def test_every_refusal_is_named_with_what_to_do(served: tuple[str, ...]) -> None:
    outcome = _ask(*served, *ON, "--use-ray", "--grpc-mode")
    assert outcome.returncode == 1
    first, second = _problems(outcome)
    assert "Ray" in first
    assert "Remove --use-ray." in first
    assert "Remove --grpc-mode" in second


def test_a_model_that_cannot_be_protected_is_a_problem(tmp_path: Path) -> None:
    model = ("--model-path", write_tiny_whisper(tmp_path), "--device", "cpu")
    problems = _problems(_ask(*model, "--attention-backend", "torch_native", *ON))
    assert "encoder-decoder model cannot be protected" in " ".join(problems)


def test_a_wrong_setting_is_a_problem(served: tuple[str, ...]) -> None:
    outcome = _ask(*served, *ON, SGLANG_KV_CANARY_RING_CAPACITY="many")
    assert outcome.returncode == 1
    (problem,) = _problems(outcome)
    assert "SGLANG_KV_CANARY_RING_CAPACITY='many'" in problem


def test_flags_that_need_the_mode_are_a_problem(served: tuple[str, ...]) -> None:
    outcome = _ask(*served, "--kv-canary-real-data", "all")
    assert outcome.returncode == 1
    of_settings, of_server = _problems(outcome)
    assert "given without --kv-canary" in of_settings
    assert "would run without the canary" in of_server


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--kv-canary", "bogus"), "argument --kv-canary: invalid choice: 'bogus'"),
        (("--kv-canary-sweep-interval", "-5"), "'-5' is refused"),
        (("--kv-canary",), "argument --kv-canary: expected one argument"),
    ],
    ids=["word", "number", "nothing"],
)
def test_a_wrong_flag_is_a_problem(
    served: tuple[str, ...], flags: tuple[str, ...], named: str
) -> None:
    outcome = _ask(*served, *flags)
    assert outcome.returncode == 1, outcome.stderr
    (problem,) = _problems(outcome)
    assert problem.split()[1] == "settings"
    assert named in problem
    assert "usage" not in outcome.stderr


def test_a_server_without_the_canary_is_a_problem(served: tuple[str, ...], tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("kv-canary: log\n")
    asked = ("--kv-canary", "none"), (), ON, ("--config", str(config))
    outcomes = [_ask(*served, *flags) for flags in asked]
    assert [outcome.returncode for outcome in outcomes] == [1, 1, 0, 0]
    for outcome in outcomes[:2]:
        (problem,) = _problems(outcome)
        assert "this server would run without the canary. Add --kv-canary log" in problem


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
    outcome = _ask(*served, *ON, SGLANG_KV_CANARY_USE_BUILTIN="1")
    assert outcome.returncode == 1
    assert "SGLANG_KV_CANARY_USE_BUILTIN" in _problems(outcome)[0]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
