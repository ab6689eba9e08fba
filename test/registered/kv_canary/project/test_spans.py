"""The breakdown of a request's time: spans of servers by request, and their medians."""

import sys
from functools import partial

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.spans import _CANARY, _exists, _Recorder, by_request, halves, table

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

REQUESTS = [(10.0, 10.1), (20.0, 20.2), (30.0, 30.4), (40.0, 40.8)]
SPANS = [
    ("both", 10.01, 10.02),
    ("both", 10.03, 10.05),
    ("idle", 11.0, 11.5),  # between two requests
    *(("both", start + 0.01, start + 0.02) for start, _ in REQUESTS[1:]),
    ("slow", 30.1, 30.3),
    ("slow", 40.1, 40.5),
    ("rare", 40.1, 40.2),
]


def test_spans_count_for_the_request_in_which_they_begin() -> None:
    figures = by_request(SPANS, REQUESTS)
    assert set(figures) == {"both", "slow"}
    assert figures["both"] == pytest.approx((10, 10, 20, 1))
    assert figures["slow"] == pytest.approx((100, 300, 400, 1))


def test_slow_requests_are_apart() -> None:
    parts = halves(SPANS, REQUESTS)
    assert ("slow" in parts["fast"], "slow" in parts["slow"]) == (False, True)
    assert len(table(parts).splitlines()) == 5


def test_every_function_of_the_canary_is_still_there() -> None:
    assert [name for name in _CANARY if not _exists(f"sglang_kv_canary.{name}")] == []


def test_a_poll_without_news_is_no_span() -> None:
    recorder = _Recorder()
    poll = partial(recorder.around, "pop_transferred")
    assert poll(lambda _: [], "queue") == []
    assert poll(lambda _: ["request"], "queue") == ["request"]
    assert [name for name, *_ in recorder.spans] == ["pop_transferred"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
