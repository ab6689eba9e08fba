"""The last part of a request's KV waits for findings of its forwards, and never without end."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.containment import held_sends
from sglang_kv_canary.wiring.containment.held_sends import AT_LEAST_ROUNDS, HeldSends
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=3, suite="stage-a-test-cpu")

FOREVER = 1 << 30  # rounds


@pytest.fixture
def request_() -> Any:
    """Its prefill has run, and everything about it is known on this rank."""
    rig = ManagerRig()
    rig.manager.expect_action()
    context.managers.append(rig.manager)
    rig.result(rig.extend(1, range(5)))
    rig.settle()
    yield SimpleNamespace(rid="req-1", req_pool_idx=1)
    context.reset()


def _held(rounds_of_peers: int) -> HeldSends:
    return HeldSends(rounds_of_peers, lambda _: None)


def test_what_is_known_goes_at_once(request_: Any) -> None:
    held = _held(rounds_of_peers=0)
    assert not held.must_wait(request_)
    assert held.given_up == 0


def test_a_finding_that_waits_to_be_acted_on_holds_the_kv_back(request_: Any) -> None:
    held = _held(rounds_of_peers=2)
    assert held.must_wait(request_)
    held.begin_round()
    assert held.must_wait(request_)
    held.begin_round()
    assert not held.must_wait(request_)
    assert held.given_up == 0


def test_it_is_given_up_after_a_time_and_some_rounds_and_that_is_said(
    request_: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One round may take longer than the time: the answer is asked for before it is given up."""
    monkeypatch.setattr(held_sends, "AT_MOST_S", 0.0)
    held = _held(rounds_of_peers=FOREVER)
    for _ in range(AT_LEAST_ROUNDS):
        assert held.must_wait(request_)
        held.begin_round()
    assert not held.must_wait(request_)
    assert held.given_up == 1
    assert caplog.text.count("was sent before all findings about it were known") == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
