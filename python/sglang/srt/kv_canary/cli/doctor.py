"""`kv-canary doctor`: would a server with these arguments be protected here? Starts no server."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import CanaryConfig, CanaryMode
from ..environ import SETTINGS
from ..errors import CanaryConfigError, CanaryStartupError
from ..seam_guard import BUILTIN_ENV, wants_builtin
from ..wiring.context import context
from ..wiring.releases import SUPPORTED_SGLANG_VERSIONS, release
from ..wiring.server_args import add_canary_args
from ..wiring.startup_check import verify_hooks_applied

_WIDTH = 9


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer."""

    what: str
    text: str
    is_problem: bool = False

    def line(self) -> str:
        return f"{'PROBLEM' if self.is_problem else 'ok':<8}{self.what:<{_WIDTH}}{self.text}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-canary doctor",
        usage="kv-canary doctor [SERVER ARGUMENTS]",
        description="Checks the installation, the settings and the arguments of a server, without starting it. "
        "SERVER ARGUMENTS are those of sglang.launch_server. Ends with code 1 if there is a problem.",
    )
    _, server_argv = parser.parse_known_args(argv)
    found = False
    for finding in _findings(server_argv):
        print(finding.line(), flush=True)
        found |= finding.is_problem
    return int(found)


def _findings(server_argv: list[str]) -> Iterator[Finding]:
    yield _release()
    yield _versions()
    yield _device()
    hooks = _hooks()
    yield hooks
    try:
        yield _settings(server_argv)
    except CanaryConfigError as error:
        yield Finding("settings", str(error), is_problem=True)
    if not server_argv:
        yield Finding("server", "no arguments given: nothing is said of a particular server")
    elif not hooks.is_problem:
        yield from _server(server_argv)


def _release() -> Finding:
    import sglang.version

    installed = sglang.version.__version__
    if installed in SUPPORTED_SGLANG_VERSIONS:
        return Finding("release", f"sglang {installed} is supported")
    return Finding("release", f"nobody has tried sglang {installed}", is_problem=True)


def _versions() -> Finding:
    import torch
    import triton

    return Finding(
        "versions",
        f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}",
    )


def _device() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("device", "no GPU: SGLang's CPU engine, the torch reference checks")
    count = torch.cuda.device_count()
    major, minor = torch.cuda.get_device_capability()
    runtime = torch.version.cuda or torch.version.hip
    return Finding(
        "device",
        f"{count} x {torch.cuda.get_device_name()}, compute capability {major}.{minor}, runtime {runtime}",
    )


def _hooks() -> Finding:
    """Loads the plugin as SGLang does, and looks for each hook in what SGLang will call."""
    from sglang.srt.plugins import load_plugins

    if release().has_own_canary and wants_builtin():
        text = f"{BUILTIN_ENV} is set, so SGLang's own canary would be in charge"
        return Finding("hooks", text, is_problem=True)
    try:
        load_plugins()
        verify_hooks_applied()
    except CanaryStartupError as error:
        return Finding("hooks", str(error), is_problem=True)
    return Finding("hooks", f"all {len(context.registration.hooks or ())} are in place")


def _settings(server_argv: list[str]) -> Finding:
    """The canary's flags and environment variables. Raises CanaryConfigError for a wrong one."""
    CanaryConfig.from_server_args(_flags(server_argv))
    given = [s.name for s in SETTINGS if s.name in os.environ]
    return Finding("settings", ", ".join(given) or "no environment variable is set")


def _flags(server_argv: list[str]) -> argparse.Namespace:
    """The canary's own flags; without `--kv-canary`, as if it were asked for."""
    parser = argparse.ArgumentParser(add_help=False, prog="kv-canary doctor", allow_abbrev=False)
    add_canary_args(parser)
    flags, _ = parser.parse_known_args(server_argv)
    if flags.kv_canary == CanaryMode.NONE.value:
        flags.kv_canary = CanaryMode.LOG.value
    return flags


def _server(server_argv: list[str]) -> Iterator[Finding]:
    from sglang.srt.server_args import prepare_server_args

    # With the canary off, SGLang speaks of its own arguments only, and every refusal can be named.
    server_args = _attempt(lambda: prepare_server_args(_without_canary(server_argv)))
    if isinstance(server_args, Finding):
        yield server_args
        return
    settled = release().settled(server_args)
    refused = [case for case in release().refusals() if case.predicate(settled)]
    for case in refused:
        text = f"{case.name} cannot be protected: {case.why} {case.how_to_go_on}"
        yield Finding("server", text, is_problem=True)
    if not refused:
        yield Finding(
            "server",
            "no argument is refused. The model's KV pool is checked at start-up; `kv-canary pools` lists pools",
        )


def _attempt(prepare: Callable[[], Any]) -> Any:
    """What `prepare` returns, or why SGLang refuses the arguments itself."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):  # argparse prints a page of flags first
            return prepare()
    except SystemExit:
        why = (said.getvalue().strip() or "it does not say why").splitlines()[-1]
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    return Finding("server", f"SGLang refuses these arguments: {why}", is_problem=True)


def _without_canary(server_argv: list[str]) -> list[str]:
    """SGLang's own arguments. Content and sweep without a mode are refused, so all flags of the canary go."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_canary_args(parser)
    return parser.parse_known_args(server_argv)[1]
