"""Pipeline stages act in the same micro-batch, and alike, whichever of them finds damage."""

from __future__ import annotations

import mmap
import pickle
import sys
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.runner.damage_desk import Damage, DamagedSlot, Reader
from sglang_kv_canary.wiring.containment import mailbox as mailbox_module
from sglang_kv_canary.wiring.containment.hooks import around_send_to_next_stage
from sglang_kv_canary.wiring.containment.mailbox import BYTES, Mailbox
from sglang_kv_canary.wiring.containment.rank_group import RankGroup
from sglang_kv_canary.wiring.containment.staged import StagedContainment
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.forked_ranks import on_ranks

if release().has_own_canary:
    pytest.skip("the rig has a radix tree; lifted by make test", allow_module_level=True)

from sglang_kv_canary_rigs.containment_rig import ContainmentRig, read

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

TOKENS = range(8)  # of the cached prefix
STAGES = 3


class Stage:
    """Two requests run, and a prefix is cached."""

    def __init__(self, number: int, mailbox: Mailbox) -> None:
        self.rig = ContainmentRig()
        context.managers.append(self.rig.manager)  # errors are contained, as on a server
        self.rig.scheduler.flush_cache = self._flush
        self.rig.tree.insert(TOKENS)
        self.staged = StagedContainment(self.rig.containment, number, mailbox)
        self.requests = [self._request(rid, row) for row, rid in enumerate(("ada", "bob"), 1)]
        self.forward = self.rig.forward(*self.requests)

    def _request(self, rid: str, row: int) -> Any:
        return self.rig.request(rid, row, self.rig.tree.allocator.alloc(4).tolist())

    def _flush(self) -> None:
        self.rig.tree.cache.reset()
        self.rig.tree.allocator.clear()
        self.staged.after_clear(self.rig.tree.allocator)

    def find(self, *requests: Any, reason: str = "CONTENT") -> None:
        readers = tuple(read(request, self.forward, reason) for request in requests)
        self.rig.desk._pending.append(Damage(readers))

    @property
    def state(self) -> tuple[list[str], int, int]:
        ended = [request.rid for request in self.requests if request.to_finish is not None]
        cached = len(self.rig.tree.match(TOKENS).device_indices)
        return ended, cached, self.rig.tree.allocator.available_size()


class Pipeline:
    def __init__(self) -> None:
        memory = mmap.mmap(-1, BYTES * STAGES)
        self.stages = [Stage(number, Mailbox(memory, STAGES)) for number in range(STAGES)]

    def step(self, *requests: Any) -> list[list[Any]]:
        """The requests of a micro-batch go through all stages. Returns what each one takes up."""
        sent, taken = list(requests), []
        for stage in self.stages:
            taken.append(stage.staged.received(sent))
            stage.staged.between_steps()
            sent = pickle.loads(pickle.dumps(stage.staged.sent(taken[-1])))
        return taken

    @property
    def states(self) -> list[tuple[list[str], int, int]]:
        return [stage.state for stage in self.stages]


def test_nothing_is_sent_along_while_nothing_is_found() -> None:
    pipeline = Pipeline()
    before = pipeline.states
    assert pipeline.step("a") == [["a"]] * STAGES
    assert pipeline.step() == [[]] * STAGES
    assert pipeline.states == before
    assert before[0][:2] == ([], 8)


@pytest.mark.parametrize("finders", [{0}, {1}, {2}, {0, 2}], ids=str)
def test_all_stages_end_the_reader_in_the_same_micro_batch(finders: set[int]) -> None:
    pipeline = Pipeline()
    for number in finders:
        stage = pipeline.stages[number]
        stage.find(stage.requests[0])
    if 0 not in finders:
        pipeline.step()  # it is on its way to the first stage
        assert [ended for ended, *_ in pipeline.states] == [[]] * STAGES
    assert pipeline.step("a", "b") == [["a", "b"]] * STAGES
    assert {str(state) for state in pipeline.states} == {str(pipeline.states[0])}
    assert pipeline.states[0][:2] == (["ada"], 0)
    pipeline.step()
    pipeline.step()
    assert [+stage.rig.desk.outcomes for stage in pipeline.stages] == [{"aborted": 1}] * STAGES
    for number in finders:
        stage = pipeline.stages[number]
        stage.find(stage.requests[1])
    pipeline.step()
    pipeline.step()
    assert [ended for ended, *_ in pipeline.states] == [["ada", "bob"]] * STAGES


def test_what_a_wrong_row_held_is_lost_on_all_stages_until_they_are_idle() -> None:
    """One stage alone knows which slots are the request's own."""
    pipeline = Pipeline()
    stage = pipeline.stages[1]
    stage.rig.containment.rows[1, 2] = 77
    stage.find(stage.requests[0], reason="CHAIN")
    pipeline.step()
    pipeline.step()
    sizes = [state[2] for state in pipeline.states]
    for each in pipeline.stages:
        request, allocator = each.requests[0], each.rig.tree.allocator
        with each.staged.releasing(request):
            allocator.free(each.rig.containment.rows[1, :4].long())
        assert each.staged.may_miss_slots
    assert [state[2] for state in pipeline.states] == sizes
    for each in pipeline.stages:
        each.staged.on_idle()
        assert not each.staged.may_miss_slots
    assert len({state[2] for state in pipeline.states}) == 1
    assert pipeline.states[0][2] > sizes[0]


def test_a_leak_may_be_damage_until_the_verdict_is_there() -> None:
    pipeline = Pipeline()
    stage = pipeline.stages[1]
    stage.find()  # nothing that anybody has read
    assert stage.staged.may_miss_slots
    pipeline.step()
    assert stage.staged.may_miss_slots
    pipeline.step()
    assert not stage.staged.may_miss_slots


def test_memory_is_withheld_on_no_stage() -> None:
    pipeline = Pipeline()
    free = pipeline.states[0][2]
    for stage in pipeline.stages[:2]:
        stage.rig.desk._pending.append(Damage((), (DamagedSlot(150, 5, True),), (("FULL", 150),)))
    for _ in range(3):
        pipeline.step()
    assert [+stage.rig.desk.withheld for stage in pipeline.stages] == [{}] * STAGES
    assert len({state[2] for state in pipeline.states}) == 1
    assert pipeline.states[0][2] == free + 8  # the cached prefix


def _errors() -> int:
    return sum(manager.errors.total for manager in context.managers)


def test_an_error_of_the_first_stage_loses_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline()
    last, first = pipeline.stages[2], pipeline.stages[0]
    before = _errors()
    last.find(last.requests[1])
    pipeline.step()
    first.find(first.requests[0])
    with monkeypatch.context() as broken:
        broken.setattr(type(first.rig.containment), "_judge", lambda *_: 1 / 0)
        pipeline.step()
        assert [ended for ended, *_ in pipeline.states] == [["ada", "bob"]] * STAGES
        pipeline.step()
    assert _errors() == before + 1


def test_an_error_of_a_later_stage_loses_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline()
    last = pipeline.stages[2]
    before = _errors()
    last.find(last.requests[1])
    with monkeypatch.context() as broken:
        broken.setattr(type(last.rig.containment), "resolved", lambda *_: 1 / 0)
        pipeline.step()
        assert not last.rig.desk.is_waiting
    pipeline.step()
    assert [ended for ended, *_ in pipeline.states] == [["bob"]] * STAGES
    assert _errors() == before + 1


def test_the_hook_sends_a_verdict_with_the_requests_and_nothing_else() -> None:
    sent: list[Any] = []

    def send(_: Any, data: Any, async_send: bool = False) -> None:
        sent.append((data, async_send))

    around_send_to_next_stage(send, None, ["a"], async_send=True)
    stage = Pipeline().stages[0]
    context.containment = stage.staged
    try:
        stage.find(stage.requests[0])
        stage.staged.between_steps()
        around_send_to_next_stage(send, None, ["b"], async_send=True)
        around_send_to_next_stage(send, None, ["c"])
    finally:
        context.containment = None
    assert [len(data) for data, _ in sent] == [1, 2, 1]
    assert sent[1][0][1].verdict.running.keys() == {"ada"}


# Mailbox


def test_a_stage_waits_with_more_until_the_first_one_has_read() -> None:
    mailbox = Mailbox(mmap.mmap(-1, BYTES * 2), 2)
    one, two = (Damage((Reader(rid, 1, 2, 3, ("CONTENT",)),)) for rid in ("ada", "bob"))
    assert not mailbox.has_any
    assert mailbox.put(1, one) == Damage()
    assert mailbox.has_any
    assert mailbox.put(1, two) is None
    assert [*mailbox.read()] == [one]
    assert mailbox.put(1, two) is None  # not dealt with yet
    mailbox.clear()
    assert mailbox.put(1, two) == Damage()
    assert [*mailbox.read()] == [two]


@pytest.mark.parametrize("room", [400, 1500])
def test_readers_come_before_slots_where_there_is_no_room(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "BYTES", room)
    mailbox = Mailbox(mmap.mmap(-1, room * 2), 2)
    readers = (Reader("ada", 1, 2, 3, ("CONTENT",)),)
    slots = tuple(DamagedSlot(slot, slot << 40, slot != 150) for slot in range(200))
    assert mailbox.put(0, Damage(readers, slots)) == Damage()
    assert mailbox.put(1, Damage(readers)) == Damage()
    # For one of the slots, the cache is dropped.
    assert [*mailbox.read()] == [Damage(readers, slots[150:151]), Damage(readers)]


@pytest.mark.parametrize("length", [10, 200, 1000])
def test_readers_without_room_come_later(length: int) -> None:
    mailbox = Mailbox(mmap.mmap(-1, BYTES * 2), 2)
    ids = [f"{number}".zfill(length) for number in range(2000)]
    left = Damage(tuple(Reader(rid, 1, 2, 3, ("CONTENT",)) for rid in ids))
    got: list[str] = []
    rounds = 0
    while left.readers and rounds < 50:
        left, rounds = mailbox.put(0, left), rounds + 1
        got += [reader.request_id for found in mailbox.read() for reader in found.readers]
        mailbox.clear()
    assert got == ids
    assert (rounds > 1) is (length > 10)


def test_an_id_that_is_too_long_keeps_nobody_else_back(caplog: pytest.LogCaptureFixture) -> None:
    mailbox = Mailbox(mmap.mmap(-1, BYTES * 2), 2)
    long, ada = (Reader(rid, 1, 2, 3, ("CONTENT",)) for rid in ("x" * BYTES, "ada"))
    assert mailbox.put(0, Damage((long, ada))) == Damage((ada,))
    assert f"{BYTES} characters" in caplog.text
    assert [*mailbox.read()] == [Damage()]


def test_a_stage_sends_the_readers_without_room_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline()
    last = pipeline.stages[2]
    one = Damage((read(last.requests[0], last.forward),), tainted=(1,))
    monkeypatch.setattr(mailbox_module, "BYTES", len(pickle.dumps(one)) + 8 + 8)
    last.find(*last.requests)
    pipeline.step()
    pipeline.step()
    assert [ended for ended, *_ in pipeline.states] == [["ada"]] * STAGES
    pipeline.step()
    assert [ended for ended, *_ in pipeline.states] == [["ada", "bob"]] * STAGES
    assert not last.rig.desk.is_waiting


def test_all_stages_drop_the_cache_for_slots_without_room() -> None:
    """A sweep may find more than one message holds, and names no reader."""
    pipeline = Pipeline()
    slots = tuple(DamagedSlot(slot % 99 + 1, slot, True) for slot in range(20_000))
    pipeline.stages[1].rig.desk._pending.append(Damage((), slots))
    pipeline.step()
    assert [cached for _, cached, _ in pipeline.states] == [8] * STAGES
    pipeline.step()
    assert [cached for _, cached, _ in pipeline.states] == [0] * STAGES


def test_stages_of_one_host_share_a_mailbox() -> None:
    def work(group: Any) -> Any:
        stages = RankGroup(group)
        mailbox = Mailbox.hang(stages)
        if stages.rank == 1:
            mailbox.put(1, Damage((Reader("ada", 1, 2, 3, ("CONTENT",)),)))
        stages.gather(None)
        return [found.readers[0].request_id for found in mailbox.read()]

    assert on_ranks(work, 2) == [["ada"], ["ada"]]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
