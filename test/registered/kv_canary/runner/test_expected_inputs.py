"""The host's token lists reach the device as they are, and cost nothing where there are none."""

import sys

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.host_code.twins import SPAN_WORDS
from sglang_kv_canary.plan import expected_inputs
from sglang_kv_canary.plan.expected_inputs import (
    TAIL_TOKENS,
    TURNS,
    ExpectedTokens,
    KnownTokens,
    ListMemory,
    Lists,
    RowStart,
    views_of,
    words_of_lists,
)
from sglang_kv_canary_rigs.kernel_cases import kernel_device

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")
register_cuda_ci(est_time=5, suite="stage-b-test-1-gpu-small")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")

KNOWN = [
    [KnownTokens(0, [7])],
    [KnownTokens(3, [1, 2, 3]), KnownTokens(), KnownTokens(9, [4], RowStart.DECODES)],
    [KnownTokens(start=0), KnownTokens(5, [10, 11, 12, 13, 14], 12, -5)],
    [KnownTokens(start=RowStart.FORGET)],
]


def _found(expected):
    return [
        KnownTokens(first, expected.tokens[at : at + count].tolist() or (), start, chain)
        for at, first, count, start, chain in expected.spans.tolist()
    ]


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_spans_say_where_each_requests_tokens_are(known):
    expected = ExpectedTokens.from_lists(known, kernel_device())
    assert (expected.tokens.dtype, expected.spans.dtype) == (torch.int32, torch.int64)
    assert _found(expected) == known


def test_lists_that_fit_need_no_memory_of_their_own():
    """Each forward's go over those of the one before; longer ones stand elsewhere."""
    known = [KnownTokens(4, list(range(TAIL_TOKENS + 8))), KnownTokens(0, [7])]
    memory = ListMemory(words_of_lists(2, 0), kernel_device())
    places = {memory.words.data_ptr(), *(part.address for part in memory._parts)}
    for lists in (known, known[::-1], KNOWN[0]):
        expected = ExpectedTokens.from_lists(lists, kernel_device(), memory)
        assert expected.spans.data_ptr() == expected.tokens.data_ptr()
        assert expected.spans.data_ptr() in places
        assert _found(expected) == lists
    longer = [*known, KnownTokens(0, list(range(TAIL_TOKENS)))]
    expected = ExpectedTokens.from_lists(longer, kernel_device(), memory)
    assert _found(expected) == longer
    assert expected.spans.data_ptr() not in places


class _Event:
    """Stands in for a CUDA event, which a CPU does not have."""

    def __init__(self) -> None:
        self.is_over = True

    def query(self) -> bool:
        return self.is_over


class _Part:
    """Stands in for the pinned memory of a part."""

    def __init__(self, memory: ListMemory) -> None:
        pinned = torch.zeros_like(memory.words)
        self.address, self.views, self.done = pinned.data_ptr(), views_of(pinned), _Event()
        self.lists = Lists(pinned)


def _memory_with_parts(monkeypatch, words):
    """As on a GPU, where parts are free when their events say so."""
    memory = ListMemory(words, "cpu")
    memory._parts = [_Part(memory) for _ in range(TURNS)]
    packed = expected_inputs._packed
    monkeypatch.setattr(expected_inputs, "_packed", lambda *lists, pinned: packed(*lists, False))
    monkeypatch.setattr(
        expected_inputs, "record", lambda event, _: setattr(event, "is_over", False)
    )
    return memory


def _is_in_place(memory, found):
    return found.tokens.data_ptr() in {part.address for part in memory._parts}


@pytest.mark.parametrize("most_in_place", [0, 100])
def test_lists_that_the_device_may_read_are_left_alone(monkeypatch, most_in_place):
    monkeypatch.setattr(expected_inputs, "MOST_WORDS_IN_PLACE", most_in_place)
    memory = _memory_with_parts(monkeypatch, words_of_lists(1, 8))
    lists = [[KnownTokens(0, [number])] for number in range(2 * TURNS + 1)]
    for known in lists[:TURNS]:
        found = ExpectedTokens.from_lists(known, "cpu", memory)
        assert _is_in_place(memory, found) == bool(most_in_place)
        assert _found(found) == known
    # The device has read none of them yet.
    assert [int(part.lists.tokens[10]) for part in memory._parts] == [3, 0, 1, 2]
    found = ExpectedTokens.from_lists(lists[TURNS], "cpu", memory)
    assert _found(found) == lists[TURNS]
    # An allocation on the device would move SGLang's activations.
    assert found.tokens.data_ptr() == memory.words.data_ptr()
    assert [int(part.lists.tokens[10]) for part in memory._parts] == [3, 0, 1, 2]
    for part in memory._parts:
        part.done.is_over = True
    for known in lists[TURNS + 1 :]:
        found = ExpectedTokens.from_lists(known, "cpu", memory)
        assert _is_in_place(memory, found) == bool(most_in_place)
        assert _found(found) == known


def test_a_part_is_in_use_until_all_that_was_queued_before_the_next_lists_has_run(monkeypatch):
    """HEAD and TAIL read it. Their launches come after `put`, and so does the event."""
    memory = _memory_with_parts(monkeypatch, words_of_lists(1, 8))
    queued = []
    monkeypatch.setattr(expected_inputs, "record", lambda event, _: queued.append(event))
    for number in range(3):
        queued.append(f"put {number}")
        ExpectedTokens.from_lists([KnownTokens(0, [number])], "cpu", memory)
        queued.append(f"readers of {number}")
    parts = memory._parts
    assert queued == [
        *("put 0", "readers of 0"),
        *("put 1", parts[1].done, "readers of 1"),
        *("put 2", parts[2].done, "readers of 2"),
    ]


@pytest.mark.parametrize("tokens", [1, 2, 3, 100, 101, 102])
@pytest.mark.parametrize("most_in_place", [0, 40, 1000])
def test_lists_of_any_length_arrive_whole(monkeypatch, tokens, most_in_place):
    monkeypatch.setattr(expected_inputs, "MOST_WORDS_IN_PLACE", most_in_place)
    memory = _memory_with_parts(monkeypatch, words_of_lists(0, 102) + SPAN_WORDS)
    known = [KnownTokens(0, list(range(1, tokens + 1)))]
    found = ExpectedTokens.from_lists(known, "cpu", memory)
    assert _is_in_place(memory, found) == (SPAN_WORDS + (tokens + 1) // 2 <= most_in_place)
    assert _found(found) == known


def test_lists_that_torch_reads_too_are_on_the_device(monkeypatch):
    memory = _memory_with_parts(monkeypatch, words_of_lists(1, 8))
    known = [KnownTokens(0, [7])]
    found = ExpectedTokens.from_lists(known, "cpu", memory, on_device=True)
    assert found.tokens.data_ptr() == memory.words.data_ptr()
    assert _found(found) == known


@needs_gpu
@pytest.mark.parametrize("in_place", [True, False])
def test_a_busy_gpu_gets_each_forwards_lists(monkeypatch, in_place):
    if not in_place:
        monkeypatch.setattr(expected_inputs, "MOST_WORDS_IN_PLACE", 0)
    memory = ListMemory(words_of_lists(1, 8), "cuda")
    for busy in (1, 2_000_000_000):  # cycles: nothing, to load all kernels, and about a second
        torch.cuda.synchronize()
        torch.cuda._sleep(busy)
        queued = []
        for number in range(3 * TURNS):
            known = [KnownTokens(number, [number, number + 1])]
            found = ExpectedTokens.from_lists(known, "cuda", memory)
            is_pinned = not found.tokens.is_cuda
            assert in_place or not is_pinned
            copies = [torch.empty_like(t, device="cuda") for t in (found.tokens, found.spans)]
            for copy, lists in zip(copies, (found.tokens, found.spans), strict=True):
                copy.copy_(lists, non_blocking=True)  # reads where it lies, when its turn comes
            queued.append((known, ExpectedTokens(*copies)))
        torch.cuda.synchronize()
        for known, found in queued:
            assert _found(found) == known


def test_where_nothing_is_known_nothing_is_copied():
    sizes = (5, 8)
    first, again = (
        ExpectedTokens.from_lists([KnownTokens(4)] * size, kernel_device()) for size in sizes
    )
    for expected, size in ((first, sizes[0]), (again, sizes[1])):
        assert expected.spans.shape == (size, 5)
        assert not expected.spans[:, 2].any()
        assert (expected.spans[:, 3] == RowStart.KEEP).all()
    assert first.spans.data_ptr() == again.spans.data_ptr()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
