"""A scheduler without `--kv-canary` runs SGLang's own methods. Who asks for the canary later has the hooks again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import MODES
from sglang_kv_canary.testing.mode_config import server_args_of
from sglang_kv_canary.testing.serving import free_port
from sglang_kv_canary.testing.tiny_models import write_tiny_llama
from sglang_kv_canary_rigs.fresh_process import FreshProcesses
from sglang_kv_canary_rigs.on_releases import REFUSES_STORAGE

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

LOADED = """
import json, logging, pkgutil
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType, _wrap_fn
load_plugins()
from sglang.srt.managers.scheduler import Scheduler
from sglang_kv_canary.wiring import unused_hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.startup_check import AppliedHooks, hook_layers, verify_hooks_applied
from sglang_kv_canary.wiring.unused_hooks import take_unused_hooks_out

OURS = {id(hook.fn) for hook in context.registration.hooks}
OFF, LOG = (SimpleNamespace(kv_canary=mode) for mode in ("none", "log"))
def has_ours(target):
    return any(id(fn) in OURS for _, fn in hook_layers(pkgutil.resolve_name(target)))
def hooked():
    return sorted(target for target in {h.target for h in context.registration.hooks} if has_ours(target))
def is_method(target):
    return isinstance(pkgutil.resolve_name(target.rpartition(".")[0]), type)
everything = hooked()
"""
# What runs while a process or a scheduler starts
AT_THE_START = {
    "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
    "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
    "sglang.srt.entrypoints.engine.Engine.shutdown",
    "sglang.srt.managers.scheduler.Scheduler.__init__",
    "sglang.srt.server_args.ServerArgs.__post_init__",
    "sglang.srt.server_args.ServerArgs.check_server_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
}
FEWEST = 54 if REFUSES_STORAGE else 60  # hooks that are taken out
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"


def _run(code: str, *argv: str) -> object:
    done = FreshProcesses().run(LOADED + code, *argv)
    assert done.returncode == 0, done.stderr
    return done.result


def test_no_method_that_serves_is_hooked_without_the_canary() -> None:
    code = """
taken = take_unused_hooks_out(OFF)
print(json.dumps([taken, everything, [t for t in hooked() if is_method(t)]]))
"""
    taken, everything, left = _run(code)
    assert RUN_BATCH in taken
    assert len(taken) > FEWEST
    assert set(taken) < set(everything)
    assert set(left) <= AT_THE_START


def test_all_hooks_stay_where_the_canary_is_asked_for() -> None:
    code = """
print(json.dumps([take_unused_hooks_out(LOG), hooked() == everything]))
"""
    assert _run(code) == [[], True]


def test_all_hooks_stay_while_a_scheduler_of_the_process_has_the_canary() -> None:
    code = """
context.managers = [object()]
print(json.dumps([take_unused_hooks_out(OFF), hooked() == everything]))
"""
    assert _run(code) == [[], True]


def test_whoever_asks_later_has_all_hooks_again() -> None:
    code = """
before = {target: pkgutil.resolve_name(target) for target in everything if is_method(target)}
twice = [len(take_unused_hooks_out(OFF)) for _ in range(2)]
lost = len(AppliedHooks().missing())
verify_hooks_applied()
print(json.dumps([
    twice[0] == twice[1],
    lost > twice[0],
    AppliedHooks().missing() == [],
    all(pkgutil.resolve_name(target) == method for target, method in before.items()),
    context.registration.taken_out,
]))
"""
    assert _run(code) == [True, True, True, True, {}]


def test_what_another_plugin_has_hooked_too_stays_as_it_is() -> None:
    code = """
Scheduler.run_batch = theirs = _wrap_fn(Scheduler.run_batch, lambda *_: None, HookType.BEFORE)
taken = take_unused_hooks_out(OFF)
print(json.dumps(["RUN_BATCH" in taken, Scheduler.run_batch is theirs, len(taken) > FEWEST]))
""".replace("RUN_BATCH", RUN_BATCH).replace("FEWEST", str(FEWEST))
    assert _run(code) == [False, True, True]


def test_what_another_plugin_hooks_afterwards_is_not_replaced() -> None:
    """Then our hook is missing, and who asks for the canary is refused."""
    code = """
take_unused_hooks_out(OFF)
Scheduler.run_batch = theirs = _wrap_fn(Scheduler.run_batch, lambda *_: None, HookType.BEFORE)
try:
    verify_hooks_applied()
except Exception as error:
    print(json.dumps([type(error).__name__, str(error), Scheduler.run_batch is theirs]))
"""
    name, text, kept = _run(code)
    assert (name, kept) == ("CanaryStartupError", True)
    assert f"did not apply the hooks on {RUN_BATCH}." in text


def test_an_error_leaves_one_method_hooked_and_does_not_reach_the_server() -> None:
    code = """
below_hooks, said = unused_hooks.below_hooks, []
def fails_once(target, hooks):
    if target == "RUN_BATCH":
        raise RuntimeError("broken")
    return below_hooks(target, hooks)
unused_hooks.below_hooks = fails_once
unused_hooks.logger.warning = lambda text, *values: said.append(text % values)
taken = take_unused_hooks_out(OFF)
print(json.dumps([len(taken) > FEWEST, [t for t in hooked() if t in taken or t == "RUN_BATCH"], said]))
""".replace("RUN_BATCH", RUN_BATCH).replace("FEWEST", str(FEWEST))
    assert _run(code) == [
        True,
        [RUN_BATCH],
        [
            f"kv-canary is off, but hooks of it stay (targets: 1), such as on {RUN_BATCH}: RuntimeError: broken"
        ],
    ]


def test_an_inherited_method_is_inherited_again() -> None:
    code = """
from sglang_kv_canary_rigs.hooked_classes import hook_methods

class Base:
    def of_base(self):
        return 1
class Holds(Base):
    def own(self):
        return 2

context.registration.hooks = tuple(hook_methods([], (Holds, "of_base"), (Holds, "own")))
where = [[name in vars(Holds) for name in ("of_base", "own")]]
unused_hooks.take_hooks_out()
where.append([name in vars(Holds) for name in ("of_base", "own")])
lost = len(AppliedHooks().missing())
context.registration.put_hooks_back()
print(json.dumps([where, lost, AppliedHooks().missing(), Holds().of_base(), Holds().own()]))
"""
    assert _run(code) == [[[True, True], [False, True]], 2, [], 1, 2]


# Real schedulers of one process, up to where their loops begin. All arguments are made before the first of them.
SCHEDULERS = """
import inspect, sys
from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from sglang.srt.managers import scheduler as module
from sglang.srt.server_args import PortArgs, ServerArgs

class Loops(BaseException):
    pass

class Refused(BaseException):
    pass

class Quiet(module.psutil.Process):
    def parent(self):
        return self  # SGLang would end this one's parent
    def send_signal(self, _):
        raise Refused

module.psutil.Process = Quiet

def loop(*_):
    raise Loops

Scheduler.run_event_loop = loop
parameters = inspect.signature(module.run_scheduler_process).parameters.values()
seen = []
for server_args in [ServerArgs(**each) for each in json.loads(sys.argv[1])]:
    values = {
        "server_args": server_args, "port_args": PortArgs.init_new(server_args), "dp_rank": None,
        "pipe_writer": SimpleNamespace(send=lambda _: None),
    }
    try:
        module.run_scheduler_process(**{p.name: values.get(p.name, 0) for p in parameters if p.default is p.empty})
    except Loops:
        pass
    destroy_model_parallel()
    destroy_distributed_environment()
    seen.append([has_ours("RUN_BATCH"), len(context.registration.taken_out) > FEWEST, context.active])
print(json.dumps(seen))
""".replace("RUN_BATCH", RUN_BATCH).replace("FEWEST", str(FEWEST))
WITHOUT, WITH = [False, True, False], [True, False, True]


def _arguments(folder: Path, modes: list[str]) -> str:
    """Of one scheduler for each of `modes`, as SCHEDULERS takes them."""
    shared = {**server_args_of(MODES["mha"]), "model_path": write_tiny_llama(folder)}
    return json.dumps([{**shared, "nccl_port": free_port(), "kv_canary": mode} for mode in modes])


@pytest.mark.parametrize(
    "modes", [["none"], ["log"], ["none", "log"], ["log", "log"]], ids="-then-".join
)
def test_real_schedulers_take_hooks_out_unless_they_have_the_canary(
    modes: list[str], tmp_path: Path
) -> None:
    seen = _run(SCHEDULERS, _arguments(tmp_path, modes))
    assert seen == [WITH if mode == "log" else WITHOUT for mode in modes]


@pytest.mark.parametrize("number", [0, 1])
def test_a_scheduler_that_asks_and_has_no_canary_is_refused(number: int, tmp_path: Path) -> None:
    """Whatever the reason, and whether or not another one has. Here what installs it does nothing any more."""
    lose = f"""
install, installed = context.install, []
def installs_some(**arguments):
    installed.append(arguments)
    return install(**arguments) if len(installed) <= {number} else None
context.install = installs_some
"""
    arguments = _arguments(tmp_path, ["log"] * (number + 1))
    done = FreshProcesses().run(LOADED + lose + SCHEDULERS, arguments)
    assert done.returncode == 1
    assert "the scheduler is made, but the canary was never installed in it" in done.stderr


def test_a_class_that_inherits_a_hooked_method_is_not_hooked_by_its_base() -> None:
    code = """
from sglang_kv_canary_rigs.hooked_classes import hook_methods

class Base:
    def method(self):
        return 1
class Sub(Base):
    pass

called = []
context.registration.hooks = tuple(hook_methods(called, (Base, "method"), (Sub, "method")))
Sub().method()
unused_hooks.take_hooks_out()
answers = [Base().method(), Sub().method()]
while_out = list(called)
context.registration.put_hooks_back()
Sub().method()
print(json.dumps([while_out, answers, called]))
"""
    assert _run(code) == [["Sub", "Base"], [1, 1], ["Sub", "Base", "Sub", "Base"]]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
