"""Records in host memory while copies from the device are under way: who waits for which copy, and what holds then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.host_tier.host_records import HostRecords, SlotRecords
from sglang_kv_canary.record import RECORD_WORDS
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

SLOTS = 64
LIMIT_S = 20.0  # of what returns at once: a machine that is busy takes long, too


class HeldEvent:
    """Stands for the CUDA event after a copy, which a CPU has not. It happens when a test says so."""

    def __init__(self) -> None:
        self._happened = threading.Event()
        self.is_awaited = threading.Event()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        self.is_awaited.set()
        assert self._happened.wait(60), "a test let nothing happen"

    def happen(self) -> None:
        self._happened.set()


class Threads:
    """Threads beside the test's own, and the events that they may wait for."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(4)
        self._events: list[HeldEvent] = []

    def event(self) -> HeldEvent:
        self._events.append(HeldEvent())
        return self._events[-1]

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future:
        return self._pool.submit(function, *arguments)

    def at_once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Its result. No copy that is under way now arrives meanwhile."""
        awaited = [event for event in self._events if event.is_awaited.is_set()]
        result = self.start(function, *arguments).result(LIMIT_S)
        assert [event for event in self._events if event.is_awaited.is_set()] == awaited
        return result

    def close(self) -> None:
        for event in self._events:
            event.happen()
        self._pool.shutdown()


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


@pytest.fixture
def records() -> HostRecords:
    return HostRecords(SLOTS, 2)


def _slots(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def _all(value: int, count: int) -> SlotRecords:
    """Records whose every word is `value`."""
    words = torch.full((count, 2, RECORD_WORDS), value, dtype=torch.int64)
    return SlotRecords(words)


def _put(records: HostRecords, value: int, slots: torch.Tensor, event: Any | None = None) -> None:
    records.put(slots, _all(value, len(slots)), event)


def _values(read: SlotRecords) -> list[int]:
    """Of records of `_all`. 0: there is none."""
    values = read.words[:, 0, 0]
    assert (read.words == values[:, None, None]).all(), "torn"
    return values.tolist()


def _get(records: HostRecords, slots: torch.Tensor) -> list[int]:
    return _values(records.get(slots))


def _look_up(records: HostRecords, slots: torch.Tensor) -> list[int]:
    _, words = records.look_up(slots.numpy(), slice(None))
    return _values(SlotRecords(torch.from_numpy(words)))


READ = pytest.mark.parametrize("read", [_get, _look_up], ids=["get", "look_up"])


def _start_read(
    threads: Threads, read: Callable, records: HostRecords, slots: torch.Tensor, event: HeldEvent
) -> Future:
    """A read that waits for `event`."""
    result = threads.start(read, records, slots)
    assert event.is_awaited.wait(LIMIT_S)
    assert not result.done()
    return result


# Who waits

# A HeldEvent: of a later copy.
CALLS: dict[str, Callable[[HostRecords, HeldEvent], Any]] = {
    "clear other slots": lambda records, _: records.clear(_slots(1, 2)),
    "clear the slots": lambda records, _: records.clear(_slots(8, 9)),
    "clear all": lambda records, _: records.clear(),
    "put other slots": lambda records, _: _put(records, 5, _slots(1, 2)),
    "put the slots": lambda records, _: _put(records, 5, _slots(8, 9)),
    "put other slots later": lambda records, later: _put(records, 5, _slots(1, 2), later),
    "put the slots later": lambda records, later: _put(records, 5, _slots(8, 9), later),
    "part": lambda records, _: records.part(0, SLOTS),
    "get other slots": lambda records, _: records.get(_slots(1, 2)),
    "look up other slots": lambda records, _: records.look_up(np.array([1, 2]), slice(None)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("reader", [False, True], ids=["", "beside a reader that waits"])
def test_nobody_else_waits_for_a_copy(call, reader, threads: Threads, records: HostRecords) -> None:
    event = threads.event()
    _put(records, 1, _slots(1, 2))
    _put(records, 2, _slots(8, 9), event)
    if reader:
        _start_read(threads, _get, records, _slots(9), event)
    threads.at_once(call, records, threads.event())
    assert not event.query()


@READ
def test_a_read_waits_for_the_copies_to_its_slots_alone(
    read, threads: Threads, records: HostRecords
) -> None:
    mine, other = threads.event(), threads.event()
    _put(records, 1, _slots(1, 2))
    _put(records, 2, _slots(3, 4), other)
    _put(records, 3, _slots(8, 9), mine)
    assert threads.at_once(read, records, _slots(2, 1, 5)) == [1, 1, 0]
    result = _start_read(threads, read, records, _slots(1, 8, 9), mine)
    mine.happen()
    assert result.result(LIMIT_S) == [1, 3, 3]
    assert not other.is_awaited.is_set()


@READ
def test_two_reads_wait_for_the_same_copies(read, threads: Threads, records: HostRecords) -> None:
    events = [threads.event(), threads.event()]
    for value, event in enumerate(events, 1):
        _put(records, value, _slots(value), event)
    results = [threads.start(read, records, _slots(1, 2)) for _ in range(2)]
    for event in reversed(events):
        event.happen()
    assert [result.result(LIMIT_S) for result in results] == [[1, 2]] * 2


def test_part_has_what_has_arrived(threads: Threads, records: HostRecords) -> None:
    first, second = threads.event(), threads.event()
    _put(records, 1, _slots(1), first)
    _put(records, 2, _slots(2), second)
    assert _values(records.part(0, 4)) == [0, 0, 0, 0]
    second.happen()  # the first one is behind it on another stream
    assert _values(records.part(0, 4)) == [0, 0, 2, 0]
    first.happen()
    assert _values(records.part(0, 4)) == [0, 1, 2, 0]


def test_copies_that_nobody_reads_do_not_pile_up(records: HostRecords) -> None:
    event = HeldEvent()
    event.happen()
    for value in range(1, 50):
        _put(records, value, _slots(value % SLOTS), event)
    assert len(records._on_the_way) == 1


# What holds


@pytest.mark.parametrize("slots", [_slots(8), None], ids=["the slot", "all"])
def test_a_slot_that_is_cleared_meanwhile_stays_cleared(
    slots, threads: Threads, records: HostRecords
) -> None:
    event = threads.event()
    _put(records, 1, _slots(8, 9), event)
    records.clear(slots)
    assert threads.at_once(_get, records, _slots(8)) == [0]
    event.happen()
    kept = 0 if slots is None else 1
    assert _get(records, _slots(8, 9)) == [0, kept]
    assert _values(records.part(8, 10)) == [0, kept]
    assert records.look_up(np.array([9, 8]), slice(0))[0] == kept


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "in reverse"])
@pytest.mark.parametrize("is_cleared", [True, False], ids=["cleared", "not cleared"])
@READ
def test_what_was_put_last_holds_in_whichever_order_it_arrives(
    read, is_cleared, order, threads: Threads, records: HostRecords
) -> None:
    events = [threads.event(), threads.event()]
    _put(records, 1, _slots(7, 8), events[0])
    if is_cleared:
        records.clear(_slots(8))
    _put(records, 2, _slots(8, 9), events[1])
    for index in order:
        events[index].happen()
        new = 2 if events[1].query() else 0
        assert _values(records.part(8, 10)) == [new, new]
    assert read(records, _slots(7, 8, 9)) == [1, 2, 2]


@READ
def test_a_read_does_not_wait_for_a_copy_that_no_longer_counts(
    read, threads: Threads, records: HostRecords
) -> None:
    """As when a fetch from storage gets the slot of a page that was dropped."""
    event = threads.event()
    _put(records, 1, _slots(8, 9), event)
    _put(records, 2, _slots(8))
    assert threads.at_once(read, records, _slots(8)) == [2]
    event.happen()
    assert read(records, _slots(8, 9)) == [2, 1]


@pytest.mark.parametrize("slots", [_slots(8), None], ids=["the slot", "all"])
@READ
def test_a_slot_is_cleared_while_a_read_waits_for_it(
    read, slots, threads: Threads, records: HostRecords
) -> None:
    event = threads.event()
    _put(records, 1, _slots(8, 9), event)
    result = _start_read(threads, read, records, _slots(8, 9), event)
    threads.at_once(records.clear, slots)
    event.happen()
    assert result.result(LIMIT_S) == [0, 0 if slots is None else 1]


@READ
def test_a_slot_is_put_again_while_a_read_waits_for_it(
    read, threads: Threads, records: HostRecords
) -> None:
    first, second = threads.event(), threads.event()
    _put(records, 1, _slots(8, 9), first)
    result = _start_read(threads, read, records, _slots(8, 9), first)
    threads.at_once(records.clear, _slots(8))
    threads.at_once(_put, records, 2, _slots(8), second)
    first.happen()
    assert second.is_awaited.wait(LIMIT_S), "the read also waits for what came later"
    second.happen()
    assert result.result(LIMIT_S) == [2, 1]


# Against a plain model


@dataclass
class ArrivesWhenAwaited:
    """Stands for a CUDA event in one thread, where nobody else could let it happen."""

    log: list[int]
    number: int
    has_happened: bool = False

    def query(self) -> bool:
        return self.has_happened

    def synchronize(self) -> None:
        self.log.append(self.number)
        self.has_happened = True


@dataclass
class PlainSlot:
    """What was put since the slot was cleared, in order: (value, event or None)."""

    puts: list[tuple[int, ArrivesWhenAwaited | None]] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.puts[-1][0] if self.puts else 0

    @property
    def awaits(self) -> int | None:
        event = self.puts[-1][1] if self.puts else None
        return None if event is None or event.has_happened else event.number

    def may_show(self) -> set[int]:
        """Without waiting."""
        if self.awaits is None:
            return {self.last}
        arrived = {value for value, event in self.puts if event is None or event.has_happened}
        return {0} | arrived


SOME = st.lists(st.integers(0, 7), max_size=5, unique=True)
ACTS = st.one_of(
    st.tuples(st.sampled_from(["put", "put later", "clear", "get", "look up"]), SOME),
    st.tuples(st.just("arrive"), st.lists(st.integers(0, 30), min_size=1, max_size=3)),
    st.tuples(st.just("clear all"), st.just([])),
)


class Pair:
    """The records and the plain model, under the same calls."""

    def __init__(self) -> None:
        self._records = HostRecords(8, 2)
        self._model = [PlainSlot() for _ in range(8)]
        self._waits: list[int] = []
        self._events: list[ArrivesWhenAwaited] = []
        self._value = 0

    def act(self, name: str, numbers: list[int]) -> None:
        getattr(self, f"_{name.replace(' ', '_')}")(numbers)
        assert self._shown_are_allowed()

    def _put(self, slots: list[int], event: ArrivesWhenAwaited | None = None) -> None:
        self._value += 1
        _put(self._records, self._value, _slots(*slots), event)
        for slot in slots:
            self._model[slot].puts.append((self._value, event))

    def _put_later(self, slots: list[int]) -> None:
        self._events.append(ArrivesWhenAwaited(self._waits, len(self._events)))
        self._put(slots, self._events[-1])

    def _arrive(self, numbers: list[int]) -> None:
        for number in numbers:
            if number < len(self._events):
                self._events[number].has_happened = True

    def _clear(self, slots: list[int]) -> None:
        self._records.clear(_slots(*slots))
        for slot in slots:
            self._model[slot].puts.clear()

    def _clear_all(self, _: list[int]) -> None:
        self._records.clear()
        for slot in self._model:
            slot.puts.clear()

    def _get(self, slots: list[int], read: Callable = _get) -> None:
        asked = [self._model[slot] for slot in slots]
        expected = {slot.awaits for slot in asked} - {None}
        self._waits.clear()
        assert read(self._records, _slots(*slots)) == [slot.last for slot in asked]
        assert set(self._waits) == expected
        present = [slot.last != 0 for slot in asked]
        count, _ = self._records.look_up(np.array(slots, dtype=np.int64), slice(0))
        assert count == [*present, False].index(False)

    def _look_up(self, slots: list[int]) -> None:
        self._get(slots, _look_up)

    def _shown_are_allowed(self) -> bool:
        """Nothing of this waits."""
        self._waits.clear()
        shown = _values(self._records.part(0, 8))
        allowed = (slot.may_show() for slot in self._model)
        return (
            all(v in values for v, values in zip(shown, allowed, strict=True)) and not self._waits
        )

    def finish(self) -> None:
        for event in self._events:
            event.has_happened = True
        self._get(list(range(8)))
        assert _values(self._records.part(0, 8)) == [slot.last for slot in self._model]


@settings(max_examples=volume(150, 2000), deadline=None)
@given(st.lists(ACTS, min_size=3, max_size=40))
def test_records_are_those_of_a_plain_model_that_applies_all_in_order(
    acts: list[tuple[str, list[int]]],
) -> None:
    pair = Pair()
    for name, numbers in acts:
        pair.act(name, numbers)
    pair.finish()


# Many threads


class Scheduler:
    """Puts and clears slots at random. Each call has a number, from 1 on, which its records hold."""

    def __init__(self, records: HostRecords, seed: int) -> None:
        self.last = np.zeros(SLOTS, dtype=np.int64)  # call of each slot that has returned
        self.cleared: list[list[int]] = [[0] for _ in range(SLOTS)]  # calls
        self.begun = 0
        self.held: list[HeldEvent] = []
        self._records = records
        self._rng = np.random.default_rng(seed)

    def call(self) -> None:
        numbers = self._rng.choice(SLOTS, self._rng.integers(1, 12), replace=False)
        slots, kind = torch.from_numpy(numbers), self._rng.integers(0, 8)
        call = self.begun + 1
        if kind < 3:
            for number in numbers:  # before readers can see it
                self.cleared[number].append(call)
        self.begun = call
        if kind < 3:
            self._records.clear(slots)
        else:
            _put(self._records, call, slots, None if kind == 3 else self._event())
        self.last[numbers] = call

    def _event(self) -> HeldEvent:
        self.held.append(HeldEvent())
        return self.held[-1]

    def let_some_happen(self, count: int) -> None:
        """In any order."""
        for _ in range(min(count, len(self.held))):
            self.held.pop(self._rng.integers(0, len(self.held))).happen()

    def check(self, slot: int, value: int, before: int, begun: int) -> None:
        """`before`: the slot's last call before it was read. `begun`: calls until it was."""
        if value:
            assert before <= value <= begun
            assert value not in self.cleared[slot]
        else:
            assert any(before <= call <= begun for call in self.cleared[slot])


def _read_until(
    is_over: threading.Event, records: HostRecords, scheduler: Scheduler, seed: int
) -> int:
    """Returns how often it has read."""
    rng, reads, read = np.random.default_rng(seed), 0, (_get, _look_up)[seed % 2]
    while not is_over.is_set():
        slots = rng.choice(SLOTS, 6, replace=False)
        before = scheduler.last[slots]
        values = read(records, torch.from_numpy(slots))
        begun = scheduler.begun
        for slot, value, call in zip(slots, values, before.tolist(), strict=True):
            scheduler.check(slot, value, call, begun)
        reads += 1
    return reads


@pytest.mark.parametrize("seed", range(volume(3, 20)))
def test_reads_of_many_threads_see_each_slot_in_order(
    seed: int, threads: Threads, records: HostRecords
) -> None:
    scheduler, is_over = Scheduler(records, seed), threading.Event()
    readers = [threads.start(_read_until, is_over, records, scheduler, n) for n in range(3)]
    try:
        for step in range(1500):
            scheduler.call()
            _values(records.part(0, SLOTS))
            scheduler.let_some_happen(step % 3)
    finally:
        is_over.set()
        scheduler.let_some_happen(len(scheduler.held))
    assert min(reader.result(LIMIT_S) for reader in readers) > 5
    expected = [
        0 if call in cleared else call
        for call, cleared in zip(scheduler.last.tolist(), scheduler.cleared, strict=True)
    ]
    assert _get(records, torch.arange(SLOTS)) == expected


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
