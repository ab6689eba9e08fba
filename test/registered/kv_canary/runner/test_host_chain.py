"""The host computes the same chain as the records have, in one pass over the tokens."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.plan.host_chain import chain_of_tokens, first_links, links_of_tokens
from sglang_kv_canary.record import chain_step, pack_identity

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

TOKENS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=40)
ANCHORS = st.integers(-(1 << 63), (1 << 63) - 1)


def _walked(tokens: list[int], anchor: int) -> int:
    chain = anchor
    for position, token in enumerate(tokens):
        chain = chain_step(chain, token, position)
    return chain


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(tokens=TOKENS, anchor=ANCHORS)
def test_the_chain_of_a_list_is_that_of_its_steps(tokens, anchor) -> None:
    assert chain_of_tokens(tokens, anchor) == _walked(tokens, anchor)


@pytest.mark.parametrize("count", [4095, 4096, 4097, 20000])
def test_long_lists(count) -> None:
    tokens = [(7 * i) % 151643 for i in range(count)]
    assert chain_of_tokens(tokens, -3) == _walked(tokens, -3)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(0, 1 << 31)), max_size=20
    )
)
def test_first_links_are_one_step_from_0(records) -> None:
    words = np.array(records, dtype=np.int64).reshape(-1, 2)
    found = first_links(words[:, 0].copy(), words[:, 1].copy())
    assert found.tolist() == [chain_step(0, token, position) for token, position in records]


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(tokens=TOKENS, before=ANCHORS, first=st.integers(0, 1 << 20))
def test_records_of_tokens_are_those_of_single_steps(tokens, before, first) -> None:
    identities, chains = links_of_tokens(tokens, before, first)
    chain, expected = before, []
    for position, token in enumerate(tokens, first):
        chain = chain_step(chain, token, position)
        expected.append((pack_identity(token, position), chain))
    assert list(zip(identities.tolist(), chains.tolist(), strict=True)) == expected


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
