"""`kv-canary doctor`: would a server with these arguments be protected here? Starts no server."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..config import FLAG_MODE, CanaryConfig, CanaryMode, is_asked_for
from ..environ import ALL_SETTINGS
from ..errors import CanaryConfigError, CanaryStartupError
from ..pool_patcher.api import record_bytes_per_slot
from ..pool_patcher.installed_pools import installed_pools
from ..pool_patcher.registry import Coverage
from ..seam_guard import BUILTIN_ENV, wants_builtin
from ..wiring.context import context
from ..wiring.coverage import paths_of
from ..wiring.memory import draft_model_config, pool_class_of
from ..wiring.releases import SUPPORTED_SGLANG_VERSIONS, release
from ..wiring.server_args import add_canary_args, refused_setups
from ..wiring.startup_check import verify_hooks_applied
from . import machine


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
    yield _drivers()
    hooks = _hooks()
    yield hooks
    try:
        # Without the canary's flags, SGLang speaks of its own arguments only, and every refusal can be named.
        flags, own = _split(server_argv)
    except CanaryConfigError as error:
        yield Diagnosis("settings", str(error), is_problem=True)
        return
    yield _settings(flags)
    if not server_argv:
        yield Diagnosis("server", "no arguments given: nothing is said of a particular server")
    elif not hooks.is_problem:
        yield from _server(flags, own)


def _release() -> Diagnosis:
    import sglang.version

    installed = sglang.version.__version__
    if installed in SUPPORTED_SGLANG_VERSIONS:
        return Diagnosis("release", f"sglang {installed} is supported")
    return Diagnosis("release", f"nobody has tried sglang {installed}", is_problem=True)


def _versions() -> Diagnosis:
    from ..kernels.triton.direct_launch import slowness

    texts = machine.versions(), slowness()
    return Diagnosis("versions", "; ".join(filter(None, texts)))


def _device() -> Diagnosis:
    return Diagnosis(
        "device",
        machine.device() or "no GPU: SGLang's CPU engine, the NumPy reference checks",
    )


def _drivers() -> Diagnosis:
    """A GPU that torch cannot use is a problem: nobody would serve beside it on purpose."""
    driver, runtime = machine.driver(), machine.runtime()
    text = f"{driver or 'no GPU driver'}; torch is built for {runtime}"
    unseen = bool(driver) and not machine.device() and "CUDA_VISIBLE_DEVICES" not in os.environ
    return Diagnosis("drivers", text + "; torch finds no GPU" * unseen, is_problem=unseen)


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


def _settings(flags: argparse.Namespace) -> Diagnosis:
    """The canary's flags and environment variables."""
    as_if_on = argparse.Namespace(**vars(flags))
    if not is_asked_for(flags):
        as_if_on.kv_canary = CanaryMode.LOG.value
    try:
        CanaryConfig.from_server_args(flags)  # refuses the other flags without the mode
        CanaryConfig.from_server_args(as_if_on)  # a canary that is off reads no variable
    except CanaryConfigError as error:
        return Diagnosis("settings", str(error), is_problem=True)
    given = [s.name for s in ALL_SETTINGS if s.name in os.environ]
    return Diagnosis("settings", ", ".join(given) or "no environment variable is set")


class _CanaryParser(argparse.ArgumentParser):
    """Raises CanaryConfigError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise CanaryConfigError(message)


def _split(server_argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the canary's own flags, SGLang's arguments without them). Raises CanaryConfigError for a wrong flag."""
    parser = _CanaryParser(add_help=False, prog="kv-canary doctor", allow_abbrev=False)
    add_canary_args(parser)
    return parser.parse_known_args(server_argv)


def _server(flags: argparse.Namespace, own: list[str]) -> Iterator[Diagnosis]:
    from sglang.srt.server_args import prepare_server_args

    server_args = _attempt(lambda: prepare_server_args(own))
    if isinstance(server_args, Diagnosis):
        yield server_args
        return
    with_model = _with_model(server_args)
    yield from _refusals(with_model)
    # A config file's flags are among SGLang's own arguments here.
    if not (is_asked_for(flags) or is_asked_for(server_args)):
        text = (
            f"{FLAG_MODE} is neither log nor raise: this server would run without the canary. "
            f"Add {FLAG_MODE} log."
        )
        yield Diagnosis("server", text, is_problem=True)
    yield from _pools(server_args)
    sweeps = bool(flags.kv_canary_sweep_interval or server_args.kv_canary_sweep_interval)
    yield from _paths(with_model, sweeps)


@dataclass(frozen=True, slots=True)
class _WithModel:
    """SGLang's arguments, with the model's configuration. From 0.5.22 on they keep none, and take none up."""

    args: Any
    model_config: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.args, name)


def _with_model(server_args: Any) -> Any:
    """Rules about the model look for it in the arguments."""
    from sglang.srt.configs.model_config import ModelConfig

    if getattr(server_args, "model_config", None) is None:
        with contextlib.suppress(Exception):  # `_pools` tells it
            return _WithModel(server_args, ModelConfig.from_server_args(server_args))
    return server_args


def _refusals(server_args: Any) -> Iterator[Diagnosis]:
    refused = refused_setups(server_args)
    for case in refused:
        text = f"{case.name} cannot be protected: {case.why} {case.how_to_go_on}"
        yield Diagnosis("server", text, is_problem=True)
    if not refused:
        yield Diagnosis(
            "server",
            "no argument is refused. The KV pools are checked again at start-up",
        )


def _pools(server_args: Any) -> Iterator[Diagnosis]:
    """The pools of the target and of its draft model, as far as their configurations tell."""
    from sglang.srt.configs.model_config import ModelConfig

    models = {"target": ModelConfig.from_server_args, "draft": draft_model_config}
    for runner, config_of in models.items():
        try:
            config = config_of(server_args)
        except Exception as error:  # SGLang's own, of many kinds
            text = f"the {runner} model's configuration: {type(error).__name__}: {error}"
            yield Diagnosis("pools", text, is_problem=True)
            continue
        if config is not None:
            yield _pool(runner, pool_class_of(config))


def _pool(runner: str, name: str) -> Diagnosis:
    known = installed_pools(release().known_pools())
    pool = next((p for p in known if p.name.endswith(f".{name}")), None)
    if pool is None or pool.status is Coverage.REFUSED:
        why = pool.note if pool else "this release has no such class"
        return Diagnosis("pools", f"{runner} model: {name} is refused: {why}", is_problem=True)
    sizes = record_bytes_per_slot(name).items()
    records = ", ".join(f"{size} bytes for each {kind.value} slot" for kind, size in sizes)
    text = f"{runner} model: {name}, {pool.groups}: {pool.note}; records take at most {records}"
    return Diagnosis("pools", text)


def _paths(server_args: Any, sweeps: bool) -> Iterator[Diagnosis]:
    used = paths_of(server_args, sweeps)
    covered = [path.name for path in used if path.status is Coverage.COVERED]
    yield Diagnosis("paths", f"covered: {'; '.join(covered)}")
    for path in used:
        if path.status is Coverage.PARTLY:
            yield Diagnosis("paths", f"partly: {path.name}: {path.note}")


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
