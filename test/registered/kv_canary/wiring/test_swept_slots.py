"""What fills slots from elsewhere waits for the sweep that may still read them."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.sweep import orchestrator
from sglang_kv_canary.wiring import collect_hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.swept_slots import await_sweep, wait_for_sweep
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.on_releases import with_disaggregation
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


class _Sweep:
    """Stands in for the CUDA event after a sweep's launches, which a CPU does not have."""

    def __init__(self, log: list[str], is_over: bool = False) -> None:
        self._log, self._is_over = log, is_over

    def query(self) -> bool:
        return self._is_over

    def synchronize(self) -> None:
        self._log.append("host waits")


class _Stream:
    """Stands in for a stream."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def wait_event(self, event: _Sweep) -> None:
        self._log.append(event)


@pytest.fixture
def rig() -> ManagerRig:
    rig = ManagerRig()
    context.add(rig.manager, object())
    return rig


def test_copies_of_a_stream_come_after_the_sweep(rig: ManagerRig) -> None:
    log: list[Any] = []
    await_sweep(_Stream(log))  # there was none yet
    await_sweep(None)
    assert log == []
    rig.manager.swept = _Sweep(log)
    await_sweep(_Stream(log))
    await_sweep(None)
    assert log == [rig.manager.swept]


def test_the_host_waits_only_for_a_sweep_that_is_not_over(rig: ManagerRig) -> None:
    log: list[str] = []
    wait_for_sweep()
    rig.manager.swept = _Sweep(log, is_over=True)
    wait_for_sweep()
    assert log == []
    rig.manager.swept = _Sweep(log)
    wait_for_sweep()
    assert log == ["host waits"]


def test_without_a_canary_nobody_waits() -> None:
    await_sweep(_Stream([]))
    wait_for_sweep()


@with_disaggregation
def test_slots_are_given_to_a_transfer_after_the_sweep(
    rig: ManagerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill server writes to them as soon as it knows them, and their last owner's free is applied at once."""
    log: list[str] = []
    rig.manager.swept = _Sweep(log)
    monkeypatch.setattr(rig.manager, "settle_slots", lambda: log.append("settle"))
    (hook,) = [hook for hook in collect_hooks() if hook.target.endswith("Queue._pre_alloc")]
    request = SimpleNamespace(bootstrap_room=7, rid="ada", lora_id=None)
    hook.fn(None, SimpleNamespace(), request)
    assert log == ["host waits", "settle"]


class _Queued:
    """Stands in for launches of a sweep that wait for a forward on their stream, and for the event after them."""

    def __init__(self) -> None:
        self._launches: list[tuple[Any, ...]] = []
        self._launch = orchestrator.launch_endpoints_sweep

    def put(self, *launch: Any) -> None:
        self._launches.append(launch)

    def query(self) -> bool:
        return not self._launches

    def synchronize(self) -> None:
        while self._launches:
            self._launch(*self._launches.pop(0))


@with_disaggregation
@pytest.mark.parametrize("content", [ContentMode.NONE, ContentMode.ALL], ids=str)
def test_an_eviction_for_a_transfer_is_no_finding_of_a_sweep_that_waits(
    content: ContentMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free is applied at once, before the forward that runs is over."""
    rig = TreeRig(sweep_interval=1, content=content)
    context.add(rig.manager, object())
    sweep = orchestrator.SweepOrchestrator(rig.manager.config, rig.manager.groups, rig.manager.sink)
    sweep.attach_radix_cache(rig.tree)
    rig.serve(list(range(100, 140)), [5, 6, 7])
    queued = _Queued()
    monkeypatch.setattr(orchestrator, "launch_endpoints_sweep", queued.put)
    monkeypatch.setattr(rig.manager, "note_sweep", lambda: setattr(rig.manager, "swept", queued))
    while queued.query():
        sweep.maybe_run_sweep(rig.manager)
    rig.evict(100)
    (hook,) = [hook for hook in collect_hooks() if hook.target.endswith("Queue._pre_alloc")]
    hook.fn(None, SimpleNamespace(), SimpleNamespace(bootstrap_room=7, rid="ada", lora_id=None))
    assert queued.query()
    assert rig.settle() == []
    assert rig.manager.state.counters[:, TagCounter.CHECKED].sum() > 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
