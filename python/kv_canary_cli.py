"""The command `kv-canary`.

It stands outside of the package `sglang`, whose import takes seconds: help and version answer without it, and the
command keeps its name wherever the canary's modules are imported from.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["COMMANDS", "main"]

_PACKAGE = "sglang_kv_canary"
# As a shell reports them.
_CLOSED_PIPE = 128 + signal.SIGPIPE
_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True, slots=True)
class Command:
    """`module` of the package has `main(argv) -> exit code`; it is imported only when called."""

    name: str
    module: str
    help: str
    needs_sglang: bool = True


COMMANDS: tuple[Command, ...] = (
    Command(
        "bundle", "cli.bundle", "pack event files and versions for an issue, without token ids"
    ),
    Command(
        "demo", "demo.run", "serve with a real engine under the canary, then catch injected faults"
    ),
    Command("doctor", "cli.doctor", "would a server with these arguments be protected here"),
    Command(
        "fault-table",
        "cli.fault_table",
        "bugs that happened to KV caches, staged in SGLang's own code: which are caught",
    ),
    Command(
        "faults",
        "cli.faults",
        "faults that can be injected, with arguments and what must be reported",
    ),
    Command("pools", "cli.pools", "what is covered, by KV pool class and by path of SGLang"),
    Command(
        "report",
        "cli.report",
        "what event files tell, as a page or for the terminal",
        needs_sglang=False,
    ),
    Command(
        "selftest",
        "cli.selftest",
        "does every check work on this machine's device, without a server",
    ),
    Command("settings", "cli.settings", "flags and environment variables, with defaults"),
)


class _OutputError(Exception):
    """Nothing more can be written to stdout. The cause is an OSError."""


class _Output:
    """Another stream, whose errors cannot be taken for those of other files and pipes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise _OutputError from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise _OutputError from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        with _checked_output():
            return _main(argv)
    except _OutputError as error:
        return _end_without_output(error.__cause__)
    except KeyboardInterrupt:
        _drop_output()
        return _INTERRUPTED


@contextlib.contextmanager
def _checked_output() -> Iterator[None]:
    """Within it stdout takes any character, and raises _OutputError. At its end all is written."""
    stream = sys.stdout
    if stream is None:  # the process has been started without one
        yield
        return
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    output = _Output(stream)
    with contextlib.redirect_stdout(output):
        try:
            yield
        except SystemExit:  # argparse has printed a help text
            output.flush()
            raise
        output.flush()


def _drop_output() -> None:
    """The interpreter writes what is left when it ends. That must neither fail again nor wait for a reader."""
    with contextlib.suppress(AttributeError, OSError):
        stdout = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stdout)
        os.close(nowhere)


def _end_without_output(error: BaseException | None) -> int:
    _drop_output()
    if isinstance(error, BrokenPipeError):  # the reader has seen enough
        return _CLOSED_PIPE
    print(f"kv-canary: cannot write the answer: {error}", file=sys.stderr)
    return 1


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.version:
        print(f"kv-canary {_version('sglang-kv-canary')}, sglang {_version('sglang')}")
        return 0
    if args.command is None:
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        parser.print_help()
        return 0
    return _run(next(c for c in COMMANDS if c.name == args.command), rest)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kv-canary",
        description="KV-canary checks, on every forward of SGLang, that each KV slot still holds what its "
        "reader expects.",
        epilog="`kv-canary COMMAND --help` shows the options of a command.",
    )
    parser.add_argument(
        "--version", action="store_true", help="show the versions of KV-canary and SGLang"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.help, add_help=False)
    return parser


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "is not installed"


def _run(command: Command, argv: Sequence[str]) -> int:
    _be_quiet()
    if command.needs_sglang and (problem := _sglang_problem()):
        print(problem, file=sys.stderr)
        return 1
    return importlib.import_module(f"{_PACKAGE}.{command.module}").main(argv)


def _sglang_problem() -> str:
    """Why a command that needs SGLang cannot run here, or ""."""
    try:
        commands = importlib.import_module(f"{_PACKAGE}.cli")
        return commands.sglang_problem()
    except ModuleNotFoundError as error:
        return (
            f"kv-canary: {error}. SGLang cannot be imported in {sys.prefix}: install "
            "sglang-kv-canary[sglang] into this environment (on a CPU machine: `make setup` in the project's "
            "folder), then run this again."
        )


def _be_quiet() -> None:
    """SGLang's imports emit warnings that have nothing to do with the command; so do the processes that it starts."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)


if __name__ == "__main__":  # processes that a command spawns import this file, too
    sys.exit(main())
