"""The host's token lists reach the device as they are, and cost nothing where there are none."""

import sys

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.plan.expected_inputs import (
    TAIL_TOKENS,
    ExpectedTokens,
    KnownTokens,
    ListMemory,
    RowStart,
    words_of_lists,
)
from sglang_kv_canary_rigs.kernel_cases import kernel_device

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")
register_cuda_ci(est_time=5, suite="stage-b-test-1-gpu-small")

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
    for lists in (known, known[::-1], KNOWN[0]):
        expected = ExpectedTokens.from_lists(lists, kernel_device(), memory)
        assert expected.spans.data_ptr() == expected.tokens.data_ptr() == memory.words.data_ptr()
        assert _found(expected) == lists
    longer = [*known, KnownTokens(0, list(range(TAIL_TOKENS)))]
    expected = ExpectedTokens.from_lists(longer, kernel_device(), memory)
    assert _found(expected) == longer
    assert memory.words.data_ptr() != expected.spans.data_ptr()


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
