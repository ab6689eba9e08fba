"""Records that come with loaded bytes: the kernels against the reference, and both against plain Python."""

import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.record import FORWARD_MASK, Mode, State, pack_writer
from sglang_kv_canary_rigs.kernel_cases import SIDES, Twin, kernel_device, make_group, make_state
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")
register_cuda_ci(est_time=40, suite="stage-b-test-1-gpu-small")

NUM_SLOTS = 300
# Forwards around the last one that had begun when the bytes were there
AFTER = (0, 7, FORWARD_MASK - 2)
QUEUED = 1 << 10  # as many forwards as may have begun since
FORWARDS = (-2, -1, 0, 1, 2, QUEUED, QUEUED + 1, (1 << 31) - 1, 1 << 31)
MODES = (Mode.EXTEND, Mode.LOADED)
STATES = (State.LIVE, State.FREED, State.ALLOCATED, State.UNFILLED)

Records = dict[str, list[list[int]]]  # by side


@dataclass(frozen=True)
class Load:
    halves: str
    slots: list[int]
    words: list[list[list[int]]]  # by slot and half
    present: list[list[int]]  # records of all sides before
    written: list[int]  # by slot: how many of its sides a forward has replaced meanwhile
    complete_after: int


@st.composite
def loads(draw: st.DrawFn) -> Load:
    halves = draw(st.sampled_from(["KV", "K"]))
    inside = st.integers(0, NUM_SLOTS + 1)
    slots = draw(st.lists(inside, min_size=1, max_size=40, unique=True))
    after = draw(st.sampled_from(AFTER))

    def writers() -> st.SearchStrategy[int]:
        forward = st.sampled_from(FORWARDS).map(lambda ahead: (after + ahead) & FORWARD_MASK)
        packed = st.builds(
            pack_writer, forward, st.just(1), st.sampled_from(MODES), st.sampled_from(STATES)
        )
        return st.one_of(st.just(0), packed)

    word = st.integers(-(1 << 63), (1 << 63) - 1)
    records = st.tuples(word, word, st.one_of(word, writers()), writers()).map(list)
    words = [[draw(records) for _ in halves] for _ in slots]
    present = [draw(records) for _ in slots]
    written = [draw(st.integers(0, 2 * len(halves))) for _ in slots]
    return Load(halves, slots, words, present, written, after)


def _sides(load: Load) -> list[str]:
    return [name for name in SIDES if name[0].upper() in load.halves]


class Oracle:
    """Plain Python."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.records = {name: [[0] * 4 for _ in range(NUM_SLOTS)] for name in _sides(load)}
        for slot, words in self._known(load.present):
            for records in self.records.values():
                records[slot] = list(words)

    def _known(self, of_slots: list) -> list:
        pairs = zip(self.load.slots, of_slots, strict=True)
        return [(slot, each) for slot, each in pairs if 0 < slot < NUM_SLOTS]

    def write(self) -> list[int]:
        before = []
        for slot, of_halves in zip(self.load.slots, self.load.words, strict=True):
            if not 0 < slot < NUM_SLOTS:
                before.append(0)
                continue
            _, _, content, writer = self.records["k_tail"][slot]
            gone = _state(writer) in (State.FREED, State.ALLOCATED)
            before.append(content if gone else writer)
            for half, words in zip(self.load.halves.lower(), of_halves, strict=True):
                self.records[f"{half}_tail"][slot] = list(words)
                live = _state(words[3]) == State.LIVE
                head = [words[0], words[1], 0 if live else words[2], words[3]]
                self.records[f"{half}_head"][slot] = head
        return before

    def overwrite(self) -> None:
        """A forward replaces some sides of some slots."""
        for slot, count in self._known(self.load.written):
            for name in _sides(self.load)[:count]:
                self.records[name][slot] = [5, 6, 7, 8]

    def expose(self, before: list[int]) -> None:
        known = self._known(list(zip(self.load.words, before, strict=True)))
        for slot, (of_halves, last) in known:
            ahead = (last - self.load.complete_after) & FORWARD_MASK
            loaded = (last >> 52) & 15 == Mode.LOADED
            if not last or not 0 < ahead <= QUEUED or loaded:
                continue
            for half, words in zip(self.load.halves.lower(), of_halves, strict=True):
                for name in (f"{half}_head", f"{half}_tail"):
                    record = self.records[name][slot]
                    if record[3] == words[3]:
                        record[2:] = [last, pack_writer(0, 0, Mode.FREE, State.ALLOCATED)]


def _state(writer: int) -> int:
    return (writer >> 60) & 15


def _twin(load: Load) -> Twin:
    twin = Twin(make_group(NUM_SLOTS, halves=load.halves), make_state())
    _put(twin, Oracle(load).records)
    return twin


def _put(twin: Twin, records: Records) -> None:
    for group in (twin.group, twin.kernel_group):
        for name, words in records.items():
            getattr(group, name).copy_(torch.tensor(words))


def _assert_records(twin: Twin, records: Records) -> None:
    for group in (twin.group, twin.kernel_group):
        for name, words in records.items():
            assert getattr(group, name).tolist() == words, name


def _write_loaded(
    twin: Twin, slots: torch.Tensor, words: torch.Tensor, oracle: Oracle
) -> torch.Tensor:
    known = [torch.full_like(slots, -1) for _ in range(2)]
    left = iter(known)
    twin.run("write_loaded", lambda f, group, _: f(slots, words, next(left), group))
    before = oracle.write()
    _assert_records(twin, oracle.records)
    assert [each.tolist() for each in known] == [before, before]
    return known[1]


@settings(max_examples=volume(300, 1000, on_gpu=60), deadline=None)
@given(loads())
def test_reference_kernels_and_plain_python_agree(load: Load) -> None:
    oracle, twin = Oracle(load), _twin(load)
    device = kernel_device()
    slots = torch.tensor(load.slots, device=device)
    words = torch.tensor(load.words, device=device)
    after = torch.tensor([load.complete_after], device=device)
    before = _write_loaded(twin, slots, words, oracle)
    oracle.overwrite()
    _put(twin, oracle.records)
    twin.run("expose_late_writes", lambda f, group, _: f(slots, words, before, after, group))
    oracle.expose(before.tolist())
    _assert_records(twin, oracle.records)


@pytest.mark.parametrize("count", [0, 1, 128, 129, 290])
def test_loads_of_any_length(count: int) -> None:
    slots = list(range(1, count + 1))
    live = pack_writer(3, 1, Mode.EXTEND, State.LIVE)
    words = [[[slot, -slot, 9, live], [slot, slot, 9, live]] for slot in slots]
    late = [1, 2, 0, pack_writer(9, 1, Mode.EXTEND, State.LIVE)]
    load = Load("KV", slots, words, [late] * count, [0] * count, 8)
    oracle, twin = Oracle(load), _twin(load)
    device = kernel_device()
    on_device = torch.tensor(slots, dtype=torch.int64, device=device)
    given_words = torch.tensor(words, dtype=torch.int64, device=device).view(count, 2, 4)
    before = _write_loaded(twin, on_device, given_words, oracle)
    for after, is_late in ((9, False), (8, True)):
        at = torch.tensor([after], device=device)
        twin.run(
            "expose_late_writes",
            lambda f, group, _, at=at: f(on_device, given_words, before, at, group),
        )
        if is_late:
            oracle.expose([late[3]] * count)
        _assert_records(twin, oracle.records)


@pytest.mark.parametrize("queued", [1, QUEUED])
@pytest.mark.parametrize("ago", [5, (1 << 31) - 1, (1 << 31) + 5, (1 << 32) - QUEUED - 1])
def test_a_slot_last_written_long_ago_is_loaded_and_one_written_late_is_not(
    ago: int, queued: int
) -> None:
    """`ago`: forwards before the bytes were there. `queued`: forwards after it."""
    complete_after = (1 << 32) + 100
    loaded = [5, 6, 7, pack_writer(complete_after - 50, 2, Mode.EXTEND, State.LIVE)]
    old, late = (
        pack_writer(forward, 3, Mode.DECODE, State.LIVE)
        for forward in (complete_after - ago, complete_after + queued)
    )
    twin, device = Twin(make_group(NUM_SLOTS), make_state()), kernel_device()
    slots = torch.tensor([7, 8], device=device)
    words = torch.tensor([[loaded, loaded]] * 2, device=device)
    before = torch.tensor([old, late], device=device)
    after = torch.tensor([complete_after], device=device)
    for group in (twin.group, twin.kernel_group):
        for name in SIDES:
            getattr(group, name)[slots] = words[:, 0]
    twin.run("expose_late_writes", lambda f, group, _: f(slots, words, before, after, group))
    exposed = [5, 6, late, pack_writer(0, 0, Mode.FREE, State.ALLOCATED)]
    for group in (twin.group, twin.kernel_group):
        for name in SIDES:
            assert getattr(group, name)[slots].tolist() == [loaded, exposed], name


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
