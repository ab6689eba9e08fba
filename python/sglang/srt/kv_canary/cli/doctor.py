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
from ..wiring.server_args import add_canary_args, refused_setups
from ..wiring.startup_check import verify_hooks_applied


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the answer."""

    what: str
    text: str
    is_problem: bool = False

    def line(self) -> str:
        return f"{'PROBLEM' if self.is_problem else 'ok':<8}{self.what:<9}{self.text}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-canary doctor",
        usage="kv-canary doctor [SERVER ARGUMENTS]",
        description="Checks the installation, the settings and the arguments of a server, without starting it. "
        "SERVER ARGUMENTS are those of sglang.launch_server. Ends with code 1 if there is a problem.",
    )
    _, server_argv = parser.parse_known_args(argv)
    found = False
    for diagnosis in _diagnoses(server_argv):
        print(diagnosis.line(), flush=True)
        found |= diagnosis.is_problem
    return int(found)


def _diagnoses(server_argv: list[str]) -> Iterator[Diagnosis]:
    yield _release()
    yield _versions()
    yield _device()
    hooks = _hooks()
    yield hooks
    try:
        yield _settings(server_argv)
    except CanaryConfigError as error:
        yield Diagnosis("settings", str(error), is_problem=True)
    if not server_argv:
        yield Diagnosis("server", "no arguments given: nothing is said of a particular server")
    elif not hooks.is_problem:
        yield from _server(server_argv)


def _release() -> Diagnosis:
    import sglang.version

    installed = sglang.version.__version__
    if installed in SUPPORTED_SGLANG_VERSIONS:
        return Diagnosis("release", f"sglang {installed} is supported")
    return Diagnosis("release", f"nobody has tried sglang {installed}", is_problem=True)


def _versions() -> Diagnosis:
    import torch
    import triton

    return Diagnosis(
        "versions",
        f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}",
    )


def _device() -> Diagnosis:
    import torch

    if not torch.cuda.is_available():
        return Diagnosis("device", "no GPU: SGLang's CPU engine, the torch reference checks")
    count = torch.cuda.device_count()
    major, minor = torch.cuda.get_device_capability()
    runtime = torch.version.cuda or torch.version.hip
    return Diagnosis(
        "device",
        f"{count} x {torch.cuda.get_device_name()}, compute capability {major}.{minor}, runtime {runtime}",
    )


def _hooks() -> Diagnosis:
    """Loads the plugin as SGLang does, and looks for each hook in what SGLang will call."""
    from sglang.srt.plugins import load_plugins

    if release().has_own_canary and wants_builtin():
        text = f"{BUILTIN_ENV} is set, so SGLang's own canary would be in charge"
        return Diagnosis("hooks", text, is_problem=True)
    try:
        load_plugins()
        verify_hooks_applied()
    except CanaryStartupError as error:
        return Diagnosis("hooks", str(error), is_problem=True)
    return Diagnosis("hooks", f"all {len(context.registration.hooks or ())} are in place")


def _settings(server_argv: list[str]) -> Diagnosis:
    """The canary's flags and environment variables. Raises CanaryConfigError for a wrong one."""
    flags, _ = _split(server_argv)
    if flags.kv_canary == CanaryMode.NONE.value:
        flags.kv_canary = CanaryMode.LOG.value  # as if the canary were asked for
    CanaryConfig.from_server_args(flags)
    given = [s.name for s in SETTINGS if s.name in os.environ]
    return Diagnosis("settings", ", ".join(given) or "no environment variable is set")


def _split(server_argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the canary's own flags, SGLang's arguments without them)."""
    parser = argparse.ArgumentParser(add_help=False, prog="kv-canary doctor", allow_abbrev=False)
    add_canary_args(parser)
    return parser.parse_known_args(server_argv)


def _server(server_argv: list[str]) -> Iterator[Diagnosis]:
    from sglang.srt.server_args import prepare_server_args

    # Without the canary's flags, SGLang speaks of its own arguments only, and every refusal can be named.
    _, own = _split(server_argv)
    server_args = _attempt(lambda: prepare_server_args(own))
    if isinstance(server_args, Diagnosis):
        yield server_args
        return
    refused = refused_setups(server_args)
    for case in refused:
        text = f"{case.name} cannot be protected: {case.why} {case.how_to_go_on}"
        yield Diagnosis("server", text, is_problem=True)
    if not refused:
        yield Diagnosis(
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
    return Diagnosis("server", f"SGLang refuses these arguments: {why}", is_problem=True)
