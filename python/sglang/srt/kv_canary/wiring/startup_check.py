"""Never silently off: a server that was started with the canary has it in every scheduler, or does not start.

SGLang logs and swallows errors of plugins, so nothing here assumes that a hook is in place:
- `register()` records its result in the process context, in every process;
- `verify_hooks_applied()` looks for each hook in the attribute that SGLang will call, up to the end of the start. The
  health check goes on with it (`AppliedHooks`);
- the main process launches each scheduler through `run_guarded_scheduler_process`. That function is the process's
  target, so it needs no hook there. It reports "ready" only after the canary was installed (`set_active_summary`), and
  sends a refusal to the main process;
- the main process counts these reports, and `/server_info` shows them.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ..config import is_asked_for
from ..environ import ENV_PREFIX
from ..errors import CanaryConfigError, CanaryStartupError, startup_error
from ..host_code import HOST, with_room_for_frames
from .context import context
from .hook_spec import HookSpec, HookType
from .releases import release

__all__ = [
    "ACTIVE_KEY",
    "HOOKS",
    "AppliedHooks",
    "run_guarded_scheduler_process",
    "set_active_summary",
    "verify_hooks_applied",
    "verify_none_left_out",
    "verify_scheduler_begun",
]

logger = logging.getLogger(__name__)

ACTIVE_KEY = "kv_canary_active"  # in scheduler_infos[0], and so in /server_info

_EVERYTHING = "any KV slot of this server"


def set_active_summary(summary: dict[str, Any]) -> None:
    """Note that the canary is installed in this scheduler process. `summary` (JSON) goes to `/server_info`.

    Without this call the scheduler does not become ready. Raises TypeError for values that JSON cannot hold.
    """
    context.scheduler_start.active = json.loads(json.dumps(summary))


def verify_hooks_applied() -> None:
    """Raises `CanaryStartupError` with every hook target that does not call our hook in this process.

    Hooks that a scheduler without the canary has taken out of this process are put back before.
    """
    if context.registration.hooks is None:
        raise startup_error(_why_not_registered(), _EVERYTHING)
    context.registration.put_hooks_back()
    if missing := AppliedHooks().missing():
        targets = ", ".join(dict.fromkeys(hook.target for hook in missing))
        lost = "; ".join(dict.fromkeys(hook.protects for hook in missing))
        raise startup_error(f"SGLang did not apply the hooks on {targets}.", lost)


def verify_none_left_out(key: str) -> None:
    """Raises `CanaryStartupError` if hooks that this setting needs were left out: it was given too late."""
    left_out = [hook for hook in context.registration.left_out if hook.only_with == key]
    if left_out:
        targets = ", ".join(dict.fromkeys(hook.target for hook in left_out))
        raise startup_error(
            f"{ENV_PREFIX}{key} was not set when SGLang loaded its plugins, so the hooks on {targets} are missing. "
            "Set it before the server starts.",
            left_out[0].protects,
        )


def verify_scheduler_begun() -> None:
    """Raises `CanaryStartupError` in a program that builds a model runner by itself, as benchmarks do."""
    if not context.scheduler_start.begun:
        raise startup_error(
            "this program builds a model runner without SGLang's Scheduler. Nothing would arm the canary.",
            "every forward of this program",
        )


class AppliedHooks:
    """Looks for hooks again and again, as cheaply as it can: what has not changed since is not looked into."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}  # by target: what called all its hooks at the last look

    def missing(self) -> list[HookSpec]:
        """The hooks that SGLang does not call."""
        changed = {
            target: attribute
            for target in dict.fromkeys(hook.target for hook in context.registration.hooks or ())
            if (attribute := _attribute(target)) is None or attribute is not self._seen.get(target)
        }
        hooks = [hook for hook in context.registration.hooks or () if hook.target in changed]
        missing = [hook for hook in hooks if not _is_applied(hook)]
        lost = {hook.target for hook in missing}
        self._seen.update((t, a) for t, a in changed.items() if t not in lost)
        return missing


def _attribute(target: str) -> Any:
    """What `target` itself holds, unbound where it is a method. None if there is nothing, or something inherited."""
    owner, _, name = target.rpartition(".")
    try:
        return vars(_owner(owner)).get(name)
    except (ImportError, AttributeError):
        return None


def _owner(path: str) -> Any:
    """A module, or a class in one, that is imported already in most cases."""
    module = sys.modules.get(path)
    if module is not None:
        return module
    parent, _, name = path.rpartition(".")
    module = sys.modules.get(parent)
    return pkgutil.resolve_name(path) if module is None else getattr(module, name)


def _why_not_registered() -> str:
    if context.registration.failure:
        return f"the plugin failed to register: {context.registration.failure}."
    allowed = os.environ.get("SGLANG_PLUGINS")
    excluded = f" SGLANG_PLUGINS={allowed!r} must name kv_canary." if allowed else ""
    return f"SGLang has not loaded the plugin kv_canary in process {os.getpid()}.{excluded}"


def _is_applied(hook: HookSpec) -> bool:
    try:
        attribute = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return False
    return any(
        layer is hook.fn or layer_hook is hook.fn for layer, layer_hook in hook_layers(attribute)
    )


def hook_layers(attribute: Any) -> Iterator[tuple[Any, Any]]:
    """The functions that a call of `attribute` runs, outermost first, each with its hook, if any.

    `HookRegistry` keeps the hook only in the wrapper's closure, `host_code.Hooked` as an attribute.
    """
    layer = getattr(attribute, "__func__", attribute)
    while layer is not None:
        closure = _closure(layer)
        is_direct = isinstance(layer, HOST.Hooked)
        yield layer, layer.hook if is_direct else closure.get("hook")
        replaces = "hook" in closure and "original_fn" not in closure
        layer = None if replaces else getattr(layer, "__wrapped__", None)


def _closure(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


# Scheduler process


@dataclass(frozen=True, slots=True)
class _Report:
    """The report of one scheduler process to the main process. `refusal` is "" if the canary is active."""

    rank: str
    refusal: str = ""
    active: dict[str, Any] | None = None

    def write(self, folder: str) -> None:
        """Write one file per process: no lock is shared, whichever process launched this one."""
        path = Path(folder, f"{os.getpid()}.json")
        path.with_suffix(".part").write_text(json.dumps(asdict(self)))
        path.with_suffix(".part").rename(path)

    @classmethod
    def read_all(cls, folder: str) -> list[_Report]:
        return [cls(**json.loads(path.read_text())) for path in sorted(Path(folder).glob("*.json"))]


@dataclass(frozen=True, slots=True)
class _Launch:
    """What the main process passes to each scheduler process."""

    folder: str  # folder in which it looks for reports
    main_pid: int


class _SchedulerRefusal(BaseException):
    """Bypasses SGLang's `except Exception`, which would kill the main process before it can report the reason."""


def run_guarded_scheduler_process(
    run: Callable[..., None], launch: _Launch, *args: Any, **kwargs: Any
) -> None:
    """Target of each scheduler process: `run(...)`, ready only with an active canary.

    The arguments are those of SGLang's `run_scheduler_process`. Exits with code 1 after a refusal.
    """
    call = _bound(run, args, kwargs)
    pipe, rank = call.arguments["pipe_writer"], _rank_name(call.arguments)
    context.scheduler_start.guarded = True
    try:
        _load_and_verify()
        call.arguments["pipe_writer"] = _GuardedPipe(pipe, launch.folder, rank)
        with_room_for_frames(run, *call.args, **call.kwargs)
    except (CanaryStartupError, _SchedulerRefusal) as error:
        logger.error("%s: %s", rank, error)
        _Report(rank, refusal=str(error)).write(launch.folder)
        _end_the_launch(launch.main_pid, pipe)
        sys.exit(1)


def _bound(
    run: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """The arguments of `run` by name. An engine's own function may pass `*args` on to SGLang's."""
    call = inspect.signature(run).bind(*args, **kwargs)
    if "pipe_writer" in call.arguments:
        return call
    from sglang.srt.managers.scheduler import run_scheduler_process

    return inspect.signature(run_scheduler_process).bind(*args, **kwargs)


def _load_and_verify() -> None:
    from sglang.srt.plugins import load_plugins

    try:
        load_plugins()
    except SystemExit as error:  # register() ends a process that cannot have the canary
        raise CanaryStartupError(str(error)) from error
    verify_hooks_applied()


def _rank_name(arguments: Mapping[str, Any]) -> str:
    ranks = {name: arguments.get(f"{name}_rank") for name in ("tp", "pp", "dp")}
    return "scheduler " + " ".join(f"{name}{r}" for name, r in ranks.items() if r is not None)


class _GuardedPipe:
    """The pipe on which a scheduler reports "ready". It refuses while the canary is not active."""

    def __init__(self, pipe: Any, folder: str, rank: str) -> None:
        self._pipe, self._folder, self._rank = pipe, folder, rank

    def send(self, info: Any) -> None:
        if context.scheduler_start.active is None:
            problem = "the scheduler is ready, but the canary was never installed in it."
            raise _SchedulerRefusal(startup_error(problem, _EVERYTHING))
        _Report(self._rank, active=context.scheduler_start.active).write(self._folder)
        self._pipe.send(info)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


def _end_the_launch(main_pid: int, pipe: Any) -> None:
    """Make the main process notice the refusal, whether it or a data parallel controller waits on `pipe`."""
    from sglang.srt.utils import kill_process_tree

    launcher = psutil.Process().parent()
    if launcher is None or launcher.pid == main_pid:
        pipe.send({"status": "refused by kv-canary"})
    elif launcher.ppid() == main_pid:
        # A controller would wait forever; the main process notices its end. The controller's other schedulers end
        # with it: none of them would notice until late in its own start.
        launcher.suspend()
        kill_process_tree(launcher.pid, skip_pid=os.getpid())


def _turn_error_into_refusal(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND Scheduler.__init__: hooks before it, managers after it. Pass refusals to the main process."""
    context.scheduler_start.begun = True
    asks = is_asked_for(kwargs.get("server_args") or args[1])
    of_others = len(context.managers)
    try:
        if asks:
            verify_hooks_applied()
        original(*args, **kwargs)
        if asks and len(context.managers) == of_others:
            problem = "the scheduler is made, but the canary was never installed in it."
            raise startup_error(problem, "any KV slot of this scheduler")
    except (CanaryStartupError, CanaryConfigError) as error:
        if context.scheduler_start.guarded:
            raise _SchedulerRefusal(error) from error
        raise


# Main process


def _guard_scheduler_launch(
    original: Callable[..., Any],
    cls: type,
    server_args: Any,
    port_args: Any,
    run: Callable,
    **kwargs: Any,
) -> Any:
    """AROUND Engine._launch_scheduler_processes: guard each process, and wait for all their reports."""
    if not is_asked_for(server_args):
        return original(cls, server_args, port_args, run, **kwargs)
    folder = tempfile.TemporaryDirectory(prefix="kv_canary_startup_")
    launch = _Launch(folder.name, os.getpid())
    guarded = functools.partial(run_guarded_scheduler_process, run, launch)
    result, processes = original(cls, server_args, port_args, guarded, **kwargs)
    wait, expected = result.wait_for_ready, release().schedulers_here(server_args)

    def wait_for_ready() -> None:
        with folder:
            try:
                result.scheduler_infos[0][ACTIVE_KEY] = _wait_for_reports(
                    wait, folder.name, expected
                )
            except CanaryStartupError:
                _kill(result.all_child_pids)
                raise

    result.wait_for_ready = wait_for_ready
    return result, processes


def _wait_for_reports(wait: Callable[[], None], folder: str, expected: int) -> list[dict[str, Any]]:
    """The canary reports of all scheduler processes. Raises `CanaryStartupError` if one is not active."""
    try:
        wait()
    except Exception as error:
        refused = [report for report in _Report.read_all(folder) if report.refusal]
        if not refused:
            raise
        raise CanaryStartupError(f"{refused[0].rank}: {refused[0].refusal}") from error
    active = [report.active for report in _Report.read_all(folder) if report.active is not None]
    if len(active) != expected:
        problem = f"{len(active)} of {expected} scheduler processes have the canary active."
        raise startup_error(problem, "the KV slots of the others")
    return active


def _refuse_unproven_launch(result: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER Engine._launch_subprocesses: also covers engines that launch schedulers in another way."""
    server_args = kwargs.get("server_args") or args[1]
    launch = result[3]
    if not is_asked_for(server_args) or any(ACTIVE_KEY in i for i in launch.scheduler_infos):
        return
    _kill(launch.all_child_pids)
    problem = f"{args[0].__name__} launched schedulers that did not report the canary active."
    raise startup_error(problem, _EVERYTHING)


def _kill(pids: Sequence[int]) -> None:
    from sglang.srt.utils import kill_process_tree

    for pid in pids:
        kill_process_tree(pid)


_ENGINE = "sglang.srt.entrypoints.engine.Engine"

HOOKS: tuple[HookSpec, ...] = (
    HookSpec(
        f"{_ENGINE}._launch_scheduler_processes",
        _guard_scheduler_launch,
        HookType.AROUND,
        "a scheduler process in which the canary does not start",
    ),
    HookSpec(
        f"{_ENGINE}._launch_subprocesses",
        _refuse_unproven_launch,
        HookType.AFTER,
        "schedulers that an engine of another kind launches",
    ),
    HookSpec(
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        _turn_error_into_refusal,
        HookType.AROUND,
        "a scheduler whose canary fails while it is installed",
    ),
)
