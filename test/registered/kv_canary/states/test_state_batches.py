"""Decodes of a whole batch are compared at once, and what waits for the host comes in few copies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.reports.violation import Actor
from sglang_kv_canary.states import journal
from sglang_kv_canary.states.journal import StateJournal
from sglang_kv_canary.states.ledger import Prefix, StateLedger, Use
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

SLOTS = 6


class Request:
    """Its identity is all that the ledger looks at."""


REQUESTS = [Request() for _ in range(4)]


class OneByOne(StateLedger):
    """Says of no decode that nothing is wrong with it, so that each is looked at alone."""

    def go_on(
        self, slots: Sequence[int], owners: Sequence[object], befores: np.ndarray
    ) -> list[int]:
        return list(range(len(slots)))


def actor(step: int) -> Actor:
    return Actor(step, 1, "DECODE", "a", step)


class Played:
    """One ledger under a history, and what it has found: reasons and slots, sorted within a batch."""

    def __init__(self, kind: type[StateLedger]) -> None:
        self.found: list[Any] = []
        self._batch: list[Any] = []
        self.ledger = kind(SLOTS, None, lambda it: self._batch.append((it.reason, it.slot)))

    def play(self, step: int, operation: tuple[Any, ...]) -> None:
        name, *args = operation
        getattr(self, name)(step, *args)
        self.found.append(sorted(self._batch))
        self._batch.clear()

    def decode(self, step: int, batch: list[tuple[int, int, int]]) -> None:
        slots, owners = [each[0] for each in batch], [REQUESTS[each[1]] for each in batch]
        befores = np.array([each[2] for each in batch], dtype=np.int64)
        for i in self.ledger.go_on(slots, owners, befores):
            before = int(befores[i])
            self.ledger.used(slots[i], Use(owners[i], actor(step), before, before + 1, None, 0))

    def prefill(self, step: int, slot: int, request: int, length: int) -> None:
        tokens = list(range(length))
        self.ledger.used(slot, Use(REQUESTS[request], actor(step), 0, length, tokens, 0))

    def hand_out(self, _: int, slot: int) -> None:
        self.ledger.handed_out([slot])

    def free(self, step: int, slot: int) -> None:
        self.ledger.freed([slot], actor(step))

    def cache(self, step: int, slot: int, length: int) -> None:
        self.ledger.cached(slot, Prefix(list(range(length)), 0), None, actor(step))

    def copy(self, step: int, source: int, target: int) -> None:
        self.ledger.copied([source], [target], actor(step))

    def forget(self, _: int) -> None:
        self.ledger.forget()

    def records(self) -> list[Any]:
        held = [self.ledger.record(slot) for slot in range(SLOTS)]
        return [(r.holder, r.owner, r.position, r.chain, r.chained, r.content) for r in held]


SLOT, REQUEST, LENGTH = st.integers(1, SLOTS - 1), st.integers(0, 3), st.integers(1, 4)
DECODE = st.tuples(st.integers(-1, SLOTS), REQUEST, st.integers(1, 8))
OPERATIONS = st.one_of(
    st.tuples(st.just("decode"), st.lists(DECODE, max_size=3, unique_by=lambda each: each[1])),
    st.tuples(st.just("prefill"), SLOT, REQUEST, LENGTH),
    st.tuples(st.just("hand_out"), SLOT),
    st.tuples(st.just("free"), SLOT),
    st.tuples(st.just("cache"), SLOT, LENGTH),
    st.tuples(st.just("copy"), SLOT, SLOT),
    st.tuples(st.just("forget")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=30))
def test_a_batch_is_judged_as_its_decodes_one_by_one(operations: list[tuple[Any, ...]]) -> None:
    batches, alone = Played(StateLedger), Played(OneByOne)
    for step, operation in enumerate(operations):
        batches.play(step, operation)
        alone.play(step, operation)
    assert batches.found == alone.found
    assert batches.records() == alone.records()
    assert batches.ledger.checks == alone.ledger.checks


def test_decodes_go_on_and_a_wrong_one_is_said() -> None:
    played = Played(StateLedger)
    for slot in (1, 2):
        played.play(0, ("hand_out", slot))
        played.play(0, ("prefill", slot, slot, 3))
    for before in (3, 4, 5):
        played.play(before, ("decode", [(1, 1, before), (2, 2, before)]))
    assert played.ledger.go_on([1, 2], REQUESTS[1:3], np.array([6, 6])) == []
    assert [played.ledger.record(slot).position for slot in (1, 2)] == [7, 7]
    assert not any(played.found)
    played.play(9, ("decode", [(2, 1, 7), (2, 2, 7)]))  # the first one has another's slot
    assert [(reason.name, slot) for reason, slot in played.found[-1]] == [("ROW_CHAIN", 2)]
    assert [played.ledger.record(slot).position for slot in (1, 2)] == [7, 8]


@pytest.fixture
def waiting() -> tuple[StateJournal, list[list[int]], Any]:
    ledger, acted = StateLedger(SLOTS, None, lambda _: None), []
    kept = StateJournal(ledger, torch.device("cpu"))
    return kept, acted, ManagerRig().manager


def test_forwards_share_a_copy(waiting: Any) -> None:
    kept, acted, manager = waiting
    for step in range(journal.COPY_EVERY - 1):
        kept.note(acted.append, torch.tensor([step], dtype=torch.int32))
        kept.after_forwards(manager)
    assert acted == []
    kept.note(acted.append, torch.tensor([77]))
    kept.after_forwards(manager)
    assert acted == [*([step] for step in range(journal.COPY_EVERY - 1)), [77]]


def test_numbers_of_several_types_share_a_copy(waiting: Any) -> None:
    """Each event has its own, in its order: SGLang's tables have other types than its lists of free slots."""
    kept, acted, manager = waiting
    long, short = torch.tensor([2**40, -1]), torch.tensor([[5], [6]], dtype=torch.int32)
    kept.note(lambda *numbers: acted.append(list(numbers)), short, long, None)
    kept.note_arrays(lambda array: acted.append((array.dtype, array.tolist())), short[1])
    kept.note(lambda: acted.append("nothing"))
    kept.note(acted.append, long[:1])
    kept.is_urgent = True
    kept.after_forwards(manager)
    assert acted == [[[5, 6], [2**40, -1], []], (np.int32, [6]), "nothing", [2**40]]


@pytest.mark.parametrize("is_urgent", [False, True])
def test_what_is_urgent_does_not_wait(waiting: Any, is_urgent: bool) -> None:
    kept, acted, manager = waiting
    kept.note(acted.append, torch.tensor([1]))
    kept.is_urgent = is_urgent
    kept.after_forwards(manager)
    assert acted == ([[1]] if is_urgent else [])
    assert not kept.is_urgent


def test_many_events_do_not_wait(waiting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, acted, manager = waiting
    monkeypatch.setattr(journal, "MOST_WAITING", 3)
    for number in range(3):
        kept.note(acted.append, torch.tensor([number]))
        kept.after_forwards(manager)
    assert acted == [[0], [1], [2]]


def test_an_idle_server_waits_for_nothing(waiting: Any) -> None:
    kept, acted, manager = waiting
    kept.note(acted.append, torch.tensor([1]))
    kept.on_idle(manager)
    assert acted == [[1]]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
