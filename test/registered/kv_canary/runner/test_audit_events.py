"""What each step does raises no events for audit hooks. filelock, which torch imports, has one in Python."""

from __future__ import annotations

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.fresh_process import FreshProcesses

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

# In a process of its own: an audit hook stays for good.
PROGRAM = """
import json, sys
from types import SimpleNamespace

from sglang_kv_canary.host_code import HOST, begin_to_compile
from sglang_kv_canary.single_forward_manager.phases import Phase, PhaseTracker
from sglang_kv_canary.wiring.call_site import call_of
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.slot_event import SlotEventKind

begin_to_compile().join()
events = []
watching = False
sys.addaudithook(lambda event, arguments: events.append(event) if watching else None)

class Allocator:
    page_size = 1

allocator, phases = Allocator(), PhaseTracker()
context.watch_allocator(allocator, PoolKind.FULL)

def hook():
    call = call_of(3)
    context.slot_event(allocator, SlotEventKind.FREE, None, call)
    phases.enter(Phase.PRE_OUTSIDE)
    phases.reset()
    return call

def free(req):
    return hook()

def step():
    return free(SimpleNamespace(rid="one"))

def loop():  # a call site has four frames
    return step()

first = loop()  # learns the call site
watching = True
second = loop()
watching = False
watched = len(events)
watching = True
sys._getframe()
watching = False
print(json.dumps([HOST.in_c, first, second, events[:watched], events[watched:]]))
"""


def test_calls_and_phases_raise_none() -> None:
    ended = FreshProcesses().run(PROGRAM)
    assert ended.returncode == 0, ended.stderr[-4000:]
    in_c, first, second, of_a_step, of_a_frame = ended.result
    assert in_c, "the twins in Python read frames as everyone does"
    assert first == second
    assert second[0] == 3
    assert second[2] == "one"
    assert of_a_step == []
    assert of_a_frame == ["sys._getframe"], "the hook is at work"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
