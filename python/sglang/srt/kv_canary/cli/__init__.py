"""Commands of `python -m sglang.srt.kv_canary`, one file each."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COMMANDS", "main"]


@dataclass(frozen=True, slots=True)
class CliCommand:
    """`module` of this package has `main(argv) -> exit code`; it is imported only when called."""

    name: str
    module: str
    help: str


COMMANDS: tuple[CliCommand, ...] = (
    CliCommand(
        "demo", "demo", "serve with a real engine under the canary, then catch injected faults"
    ),
    CliCommand("pools", "pools", "what is covered, by KV pool class and by path of SGLang"),
    CliCommand("settings", "settings", "flags and environment variables, with defaults"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.srt.kv_canary",
        description="KV-canary: checks, on every forward of SGLang, that each KV slot still holds what its "
        "reader expects.",
        epilog="`COMMAND --help` shows a command's own options.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.help, add_help=False)
    args, rest = parser.parse_known_args(argv)
    _be_quiet()
    if problem := _sglang_problem():
        print(problem, file=sys.stderr)
        return 1
    module = next(c.module for c in COMMANDS if c.name == args.command)
    return importlib.import_module(f"{__name__}.{module}").main(rest)


def _be_quiet() -> None:
    """What SGLang's imports warn of says nothing about the command; also in processes that it starts."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)


def _sglang_problem() -> str:
    """Why nothing can run here, or ""."""
    from sglang.srt.kv_canary.errors import CanaryStartupError
    from sglang.srt.kv_canary.wiring.version_check import SUPPORTED_SGLANG_VERSIONS, check_sglang

    try:
        _use_cpu_engine_without_gpu()
        check_sglang()
    except CanaryStartupError as error:
        return str(error)
    except ModuleNotFoundError as error:
        return (
            f"kv-canary: {error}. SGLang is not complete in {sys.prefix}: install "
            f"sglang=={SUPPORTED_SGLANG_VERSIONS[-1]} into this environment (on a CPU machine: `make setup` "
            "in the project's folder), then run this again."
        )
    return ""


def _use_cpu_engine_without_gpu() -> None:
    """SGLang asks for the first variable when its modules are imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        os.environ.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # more threads fight with the engine's processes
