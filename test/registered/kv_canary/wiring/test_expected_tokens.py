"""What the host says of a batch's tokens is what SGLang itself would feed, and costs no copy of whole lists."""

from __future__ import annotations

import sys
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import TokenCheck
from sglang_kv_canary.plan.expected_inputs import TAIL_TOKENS, KnownTokens, RowStart
from sglang_kv_canary.plan.host_chain import chain_of_tokens
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.expected_tokens import (
    _known_of_batch,
    _noted,
    tokens_of_request,
)
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.hooked import extend_to, make_request

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

TREE = SimpleNamespace(root_node=None, root_node_handle=lambda: None)
NEWER = release().has_own_canary


def _fed(request: Any) -> list[int]:
    """What SGLang itself reads in the next forward."""
    return list(request.get_fill_ids() if NEWER else request.fill_ids)


def _known(requests: list[Any], prefixes: list[int], lengths: list[int]) -> list[KnownTokens]:
    return _known_of_batch(_noted(requests, prefixes, lengths, True), TokenCheck.TAIL, None)


@pytest.mark.parametrize("check", list(TokenCheck))
def test_every_setting_knows_the_chain_of_a_cached_prefix(check: TokenCheck) -> None:
    """`none` compares no token. A prefix that is another request's must not pass even so."""
    own = [*range(100, 180)]
    context.row_owners.forget(1)
    request = make_request(TREE, 1, own)
    extend_to(request, 80)
    (known,) = _known_of_batch(_noted([request], [60], [20], True), check, None)
    assert (known.start, known.start_chain) == (60, chain_of_tokens(own[:60], 0))
    first = {TokenCheck.NONE: 80, TokenCheck.TAIL: 60 - TAIL_TOKENS, TokenCheck.ALL: 0}[check]
    assert list(known.tokens) == own[first:]


EVENTS = st.tuples(
    st.sampled_from(("chunk", "decode", "decode ahead", "retraction")), st.integers(1, 40)
)


@given(st.integers(1, 80), st.lists(EVENTS, max_size=8), st.integers(0, 80))
def test_tokens_are_those_that_sglang_reads(
    prompt: int, events: list[tuple[str, int]], first: int
) -> None:
    """`decode ahead`: with overlap scheduling, before the host has the token. The forward ends one behind the list."""
    own = [*range(100, 100 + prompt)]
    request, held, is_new = make_request(TREE, 1, own), 0, True
    for event, n in events:
        if event == "retraction":  # some of it is cached
            held, is_new = min(n, len(own)) - 1, True
            context.row_owners.forget(1)
            continue
        if event == "chunk":
            prefix, end = held, min(held + n, len(own))
        else:
            if event == "decode":
                own.append(n)
                request.output_ids.append(n)
            end = len(own) + (event == "decode ahead")
            prefix = end - 1
        if end == prefix:
            continue
        extend_to(request, end)
        fed = _fed(request)
        assert fed == own[:end]
        tail = max(0, prefix - TAIL_TOKENS)
        start = RowStart.DECODES if event == "decode ahead" else RowStart.KEEP
        if is_new:
            start = prefix
        chain = chain_of_tokens(fed[:prefix], 0) if is_new else 0
        (known,) = _known([request], [prefix], [end - prefix])
        assert known._replace(tokens=[*known.tokens]) == (tail, fed[tail:], start, chain)
        assert [*tokens_of_request(request, first, end, None)] == fed[first:end]
        assert [*tokens_of_request(request, first, end + n, None)] == fed[first:]
        held, is_new = end, False
        if event == "decode ahead":
            own.append(n)
            request.output_ids.append(n)


def _counting(kind: type, copied: list[int]) -> type:
    """A list or array that notes how many tokens its slices have."""

    def get(tokens: Any, key: Any) -> Any:
        found = kind.__getitem__(tokens, key)
        copied.append(len(found) if type(key) is slice else 1)
        return found

    return type("Counting", (kind,), {"__getitem__": get})


@pytest.mark.parametrize("ahead", [0, 1])
def test_decodes_among_prefills_copy_no_more_than_is_compared(ahead: int) -> None:
    rows, held, copied = range(1, 9), 5000, []
    requests = [make_request(TREE, row, range(held + 1 - ahead)) for row in rows]
    _noted(requests, [0] * len(rows), [held] * len(rows), True)  # by their prefills
    for request in requests:
        extend_to(request, held + 1)
        if NEWER:
            tokens = _counting(array, copied)("q", request.full_untruncated_fill_ids)
            request.full_untruncated_fill_ids = tokens
        else:
            request.fill_ids = _counting(list, copied)(request.fill_ids)
    known = _known(requests, [held] * len(rows), [1] * len(rows))
    compared = len(rows) * (TAIL_TOKENS + 1 - ahead)
    assert (sum(len(each.tokens) for each in known), sum(copied)) == (compared, compared)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
