"""What fills slots from elsewhere waits for the sweep that may still read them."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring import collect_hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.swept_slots import await_sweep, wait_for_sweep
from sglang_kv_canary_rigs.manager_rig import ManagerRig

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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
