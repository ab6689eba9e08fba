"""The last part of a request's KV waits for findings of its forwards, on all ranks, and never without end."""

from __future__ import annotations

import mmap
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.plugins.hook_registry import _wrap_fn
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import Action
from sglang_kv_canary.reports.outbox import Outbox
from sglang_kv_canary.wiring import collect_hooks, disaggregation
from sglang_kv_canary.wiring.containment import held_arrivals, held_sends
from sglang_kv_canary.wiring.containment.bell import Bell, memory_size
from sglang_kv_canary.wiring.containment.held_sends import (
    AT_LEAST_ROUNDS,
    ROUNDS_OF_BELL,
    HeldSends,
)
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.v0_5_12 import pairs
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.on_releases import with_disaggregation
from sglang_kv_canary_rigs.rig_request import RigRequest

register_cpu_ci(est_time=3, suite="stage-a-test-cpu")

SEND = "SchedulerDisaggregationPrefillMixin.send_kv_chunk"


@pytest.fixture
def request_() -> Any:
    """Its prefill has run, and everything about it is known on this rank."""
    rig = ManagerRig()
    rig.manager.expect_action()
    context.managers.append(rig.manager)
    rig.result(rig.extend(1, range(5)))
    rig.settle()
    yield _request(1)
    context.reset()


def _request(row: int | None) -> Any:
    request = RigRequest(row, rid=f"req-{row}")
    request.bootstrap_room, request.start_send_idx = row, 0
    request.origin_input_ids = [1, 2, 3]
    return request


def _bells() -> list[Bell]:
    memory = mmap.mmap(-1, memory_size(2))
    return [Bell(SimpleNamespace(rank=rank, size=2), memory) for rank in range(2)]


def _held(bell: Bell | None) -> HeldSends:
    return HeldSends(bell, lambda _: None)


def _damage(request: Any, is_found: bool) -> None:
    context.target.damage._pending = [request] if is_found else []


def test_what_is_known_goes_at_once(request_: Any) -> None:
    held = _held(None)
    assert not held.must_wait(request_)
    assert held.given_up == 0


def test_a_finding_that_waits_to_be_acted_on_holds_the_kv_back(request_: Any) -> None:
    held = _held(None)
    _damage(request_, is_found=True)
    assert held.must_wait(request_)
    _damage(request_, is_found=False)
    assert not held.must_wait(request_)


@pytest.mark.parametrize("publishes", [True, False])
def test_kv_waits_until_its_forward_has_published_or_without_that_for_a_copy(
    publishes: bool,
) -> None:
    rig, held = ManagerRig(copy_every_s=1e9), _held(None)
    rig.manager.expect_action()
    context.managers.append(rig.manager)
    try:
        rig.result(rig.extend(1, range(5)))  # the first copy
        word = rig.manager.state.outbox.clone()
        rig.manager._outbox = Outbox(word)
        rig.manager._outbox.trusted = publishes
        rig.recorder.result_arrived(rig.extend(1, range(5)))
        assert rig.manager.owes_copy
        assert held.must_wait(_request(1))
        # A copy from here would be in no order with the forward.
        assert rig.manager.owes_copy == publishes
        word[0] = rig.manager.state.outbox[0]
        assert not held.must_wait(_request(1))
    finally:
        context.reset()


def test_all_ranks_know_of_it_before_it_goes(request_: Any) -> None:
    """Also one that sends nothing of it, and has no part to hold back: it may find damage late."""
    mine, other = _bells()
    held = _held(mine)
    for _ in range(2 * ROUNDS_OF_BELL):
        assert held.must_wait(request_)
        held.begin_round()
    other.ring()  # it has found something
    other.say_known(1)
    for _ in range(ROUNDS_OF_BELL):  # in which the bell is heard
        assert held.must_wait(request_)
        held.begin_round()
    assert not held.must_wait(request_)
    assert held.given_up == 0


def test_a_rank_that_checks_nothing_any_more_holds_no_other_one_up(request_: Any) -> None:
    """After an internal error, until its records are right again."""
    mine, other = _bells()
    context.target.armed = False
    assert not _held(mine).must_wait(request_)
    other.say_known(1)
    assert other.known_everywhere() == 1


def test_the_bell_of_a_rank_is_not_taken_for_what_it_knows() -> None:
    mine, other = _bells()
    other.ring()
    mine.say_known(1 << 40)
    assert mine.known_everywhere() == 0
    other.say_known(255)
    other.say_known(3)  # of a request that was held before
    assert mine.known_everywhere() == 255
    assert [mine._memory[rank] for rank in range(2)] == [0, 1]


def test_it_is_given_up_after_a_time_and_some_rounds_and_that_is_said(
    request_: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One round may take longer than the time: the answer is asked for before it is given up."""
    monkeypatch.setattr(held_sends, "AT_MOST_S", 0.0)
    held = _held(_bells()[0])  # the other rank says nothing
    for _ in range(AT_LEAST_ROUNDS):
        assert held.must_wait(request_)
        held.begin_round()
    assert not held.must_wait(request_)
    assert held.given_up == 1
    assert caplog.text.count("was sent before all findings about it were known") == 1


def test_an_error_of_sglang_in_a_held_send_ends_the_server_as_elsewhere(request_: Any) -> None:
    sent: list[str] = []

    def send(request: Any) -> None:
        if request is request_:
            raise OSError("the transport is gone")
        sent.append(request.rid)

    held, other = HeldSends(None, send), _request(2)
    _damage(request_, is_found=True)
    assert held.must_wait(request_)
    assert held.must_wait(other)
    _damage(request_, is_found=False)
    with pytest.raises(OSError, match="the transport is gone"):
        held.go_on()
    held.go_on()
    assert sent == ["req-2"]
    assert context.target.errors.total == 0


def test_an_error_of_ours_holds_nothing_back(request_: Any) -> None:
    sent: list[str] = []
    held = HeldSends(None, lambda request: sent.append(request.rid))
    _damage(request_, is_found=True)
    assert held.must_wait(request_)
    context.target.damage = None  # an internal error
    held.go_on()
    assert (sent, context.target.errors.total) == (["req-1"], 1)


def test_what_sglang_has_ended_is_not_sent(request_: Any) -> None:
    sent: list[str] = []
    held = HeldSends(None, lambda request: sent.append(request.rid))
    _damage(request_, is_found=True)
    assert held.must_wait(request_)
    request_.req_pool_idx = None
    _damage(request_, is_found=False)
    held.go_on()
    held.go_on()
    assert sent == []


@with_disaggregation
def test_a_prompt_is_looked_through_for_images_once_however_long_it_is_held(
    request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, sent = [], []
    monkeypatch.setattr(disaggregation, "image_numbers", lambda *_: looked.append(1) or "")
    send = lambda _, request, last_chunk: sent.append(request.rid)  # noqa: E731
    for spec in collect_hooks():
        if spec.target.endswith(SEND):
            send = _wrap_fn(send, spec.fn, spec.hook_type)
    scheduler = SimpleNamespace(model_config=None)
    context.held_sends = HeldSends(None, lambda request: send(scheduler, request, True))
    _damage(request_, is_found=True)
    send(scheduler, request_, True)
    for _ in range(5):
        context.held_sends.go_on()
    assert (looked, sent) == ([], [])
    _damage(request_, is_found=False)
    context.held_sends.go_on()
    assert (looked, sent) == ([1], ["req-1"])


def test_a_request_that_fails_while_it_waits_for_its_check_leaves_nothing_behind() -> None:
    from sglang.srt.disaggregation.fake.conn import FakeKVReceiver

    rig = ManagerRig(action=Action.ABORT)
    rig.manager.expect_arrivals(1)
    context.managers.append(rig.manager)
    receiver = FakeKVReceiver(None, "", 7)
    held_arrivals.hold(None, SimpleNamespace(kv_receiver=receiver, req=_request(7)), lambda poll: 0)
    rig.manager.arrivals.await_findings(5, 0, 7)
    receiver._kv_canary_held = 5
    with pytest.raises(Exception, match="Fake"):
        receiver.failure_exception()
    arrivals = rig.manager.arrivals
    assert arrivals._firsts == {5: 0}  # what it still finds has no other owner
    arrivals.note_known(5)
    assert (arrivals._damaged, arrivals._firsts, arrivals._forgotten) == ({}, {}, set())
    assert arrivals._rows == {}


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_arrival_of_which_findings_were_lost_says_why_it_fails(is_lost: bool) -> None:
    rig, receiver = ManagerRig(), SimpleNamespace(_kv_canary_held=5)
    rig.manager.expect_arrivals(1)
    context.managers.append(rig.manager)
    arrivals = rig.manager.arrivals
    arrivals.await_findings(5, 0, 7)
    arrivals.note_lost([(5, 7)] if is_lost else [(4, 7), (5, 8), (6, 7)])
    arrivals.note_known(5)
    verdict = held_arrivals._verdict(None, _request(7), receiver)
    assert verdict == (held_arrivals._NOT_KNOWN if is_lost else "")
    assert "SGLANG_KV_CANARY_RING_CAPACITY" in held_arrivals._NOT_KNOWN


def test_failed_transfers_of_one_look_through_a_queue_share_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.disaggregation.base import KVPoll

    clock = [100.0]
    monkeypatch.setattr(pairs.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        pairs.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )
    # A second for the first one, and a little for each other one.
    for waited in (pytest.approx(101.2, abs=0.1), pytest.approx(102.4, abs=0.1)):
        pairs._before_queue()
        for _ in range(5):
            assert pairs.await_end(lambda: KVPoll.Transferring) == KVPoll.Transferring
        assert clock[0] == waited
    assert pairs.await_end(lambda: KVPoll.Success) == KVPoll.Success


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
