"""Hooks of each step are called by one object in C. They do what they did, and are found where they are looked for."""

from __future__ import annotations

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.fresh_process import FreshProcesses

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

# What a scheduler process has done by the end of its start.
START = """
import json, logging
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
load_plugins()
{before}
HookRegistry.apply_hooks()
from sglang_kv_canary.host_code import HOST, begin_to_compile
from sglang_kv_canary.wiring.direct_hooks import call_hooks_directly
from sglang_kv_canary.wiring.startup_check import AppliedHooks, verify_hooks_applied
from sglang_kv_canary.wiring.context import context
verify_hooks_applied()
applied = AppliedHooks()
assert applied.missing() == []
{in_c}
targets = call_hooks_directly()
assert applied.missing() == []
verify_hooks_applied()
"""
IN_C = "begin_to_compile().join(); assert HOST.in_c"
RUN_BATCH = "sglang.srt.managers.scheduler.Scheduler.run_batch"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


def _run(code: str, before: str = "", in_c: str = IN_C) -> object:
    done = FreshProcesses().run(START.format(before=before, in_c=in_c) + code)
    assert done.returncode == 0, done.stderr
    return done.result


def test_hooks_of_each_step_are_called_directly() -> None:
    code = """
import inspect, pkgutil
from sglang_kv_canary.wiring.direct_hooks import _IN_EACH_STEP
hooked = [pkgutil.resolve_name(target) for target in targets]
meant = {
    hook.target
    for hook in context.registration.hooks
    if hook.target.startswith(_IN_EACH_STEP)
    and isinstance(pkgutil.resolve_name(hook.target.rpartition(".")[0]), type)  # no function of a module
}
print(json.dumps([
    targets,
    sorted(meant - set(targets)),
    sorted({type(each).__name__ for each in hooked}),
    [list(inspect.signature(each).parameters)[0] for each in hooked],
    [each.__name__ == target.rpartition(".")[2] for each, target in zip(hooked, targets)],
]))
"""
    targets, left, types, firsts, named = _run(code)
    assert {RUN_BATCH, FORWARD} < set(targets)
    assert sum(".free" in target for target in targets) >= 3
    assert left == []
    assert types == ["Hooked"]
    assert set(firsts) <= {"self", "worker"}
    assert all(named)


ALLOCATE = """
import torch
from types import SimpleNamespace
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.wiring.call_site import SITES

events = []

def record(kind, pool_kind, slots, page_size, step, calls):
    count, site, _ = calls
    events.append([kind.name, slots.tolist(), count, SITES[site].functions[0]])

def a_step(allocator):
    slots = allocator.alloc(3)
    allocator.free(slots[:0])
    allocator.free(free_index=slots)

context.recorder, context.history = SimpleNamespace(step_count=0, owners=dict), True
def say(error, function):
    raise error

ledger, errors = SimpleNamespace(record=record), SimpleNamespace(contain=say)
recorder, identity = SimpleNamespace(owners=dict), SimpleNamespace(role="target")
context.managers = [SimpleNamespace(ledger=ledger, errors=errors, recorder=recorder, identity=identity)]
allocator = TokenToKVPoolAllocator(8, torch.float32, "cpu", None, False)
context.allocator_kinds[allocator] = PoolKind.FULL
{more}

def event_loop(frames=3):  # a call site is four of them
    event_loop(frames - 1) if frames else a_step(allocator)

event_loop()
print(json.dumps([events, context.frees, allocator.available_size()]))
"""
EVENTS = [["ALLOC", [1, 2, 3], 3, "a_step"], ["FREE", [1, 2, 3], 3, "a_step"]]


@pytest.mark.parametrize("in_c", [IN_C, ""], ids=["c", "python"])
def test_events_of_a_real_allocator_and_their_call_sites_are_the_same(in_c: str) -> None:
    events, frees, available = _run(ALLOCATE.format(more=""), in_c=in_c)
    assert events == EVENTS
    assert (frees, available) == (1, 8)


BROKEN = """
def fails(*_):
    raise RuntimeError("broken")

def contain(error, function):
    events.append([str(error), function.__name__])
    return True

broken, = context.managers
broken.ledger.record, broken.errors = fails, SimpleNamespace(contain=contain)
broken.lose_track = lambda error: events.append("lost")
"""


def test_an_error_of_a_hook_is_contained_and_sglang_goes_on() -> None:
    code = ALLOCATE.format(more=BROKEN)
    contained, _, available = _run(code)
    assert contained == [["broken", "after_alloc"], "lost", ["broken", "before_free"], "lost"]
    assert available == 8


def test_what_another_plugin_has_hooked_too_stays_as_it_is() -> None:
    before = """
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import _wrap_fn
HookRegistry.apply_hooks()
Scheduler.run_batch = _wrap_fn(Scheduler.run_batch, lambda *_: None, HookType.BEFORE)
"""
    code = f"""
print(json.dumps(["{RUN_BATCH}" in targets, type(Scheduler.run_batch).__name__, len(targets) > 5]))
"""
    assert _run(code, before) == [False, "function", True]


def test_static_and_class_methods_stay_as_they_are() -> None:
    code = """
from sglang_kv_canary.wiring.direct_hooks import call_directly
from sglang_kv_canary_rigs.hooked_classes import hook_methods

class Holds:
    @staticmethod
    def static(number):
        return number
    @classmethod
    def of_class(cls, number):
        return number
    def method(self, number):
        return number

specs = hook_methods([], (Holds, "static"), (Holds, "of_class"), (Holds, "method"))
replaced = [call_directly(spec.target, [spec]) for spec in specs]
one = Holds()
called = one.static(3), one.of_class(4), one.method(5), Holds.static(6), Holds.of_class(7)
print(json.dumps([replaced, called]))
"""
    assert _run(code) == [[False, False, True], [3, 4, 5, 6, 7]]


def test_an_error_while_a_wrapper_is_replaced_is_a_warning() -> None:
    code = """
from sglang.srt.managers.scheduler import Scheduler
from sglang_kv_canary.wiring import direct_hooks
before = Scheduler.run_batch
def fails(*_):
    raise RuntimeError("broken")
direct_hooks.hook_layers = fails
print(json.dumps([call_hooks_directly(), Scheduler.run_batch is before]))
"""
    assert _run(code) == [[], True]


def test_clearing_an_allocator_that_nobody_watches_is_no_flush() -> None:
    more = """
released = []
type(context).row_released = lambda _, row: released.append(row)
context.target.recorder.owners = lambda: {3: "running"}
context.managers[0].ledger.record = lambda *_: None
TokenToKVPoolAllocator(8, torch.float32, "cpu", None, False)
assert released == []
allocator.clear()
events.append(released)
"""
    assert _run(ALLOCATE.format(more=more))[0] == [[3]]


def test_nothing_is_replaced_where_the_host_code_runs_in_python() -> None:
    code = """
from sglang.srt.managers.scheduler import Scheduler
print(json.dumps([targets, type(Scheduler.run_batch).__name__]))
"""
    assert _run(code, in_c="") == [[], "function"]


def test_a_later_plugin_can_hook_what_is_called_directly() -> None:
    code = f"""
seen = []
HookRegistry._patched.discard("{RUN_BATCH}")
HookRegistry._hooks.clear()
HookRegistry.register("{RUN_BATCH}", lambda *args: seen.append(len(args)), HookType.BEFORE)
HookRegistry.apply_hooks()
from sglang.srt.managers.scheduler import Scheduler
try:
    Scheduler.run_batch(None, None)
except AttributeError:
    pass
print(json.dumps([seen, applied.missing() == []]))
"""
    assert _run(code) == [[2], True]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
