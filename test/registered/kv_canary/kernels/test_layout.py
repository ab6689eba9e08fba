"""Whose turn it is when a budget does not let every forward check everything."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.kernels.layout import turn_of

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

FORWARDS = 2_000  # seen, of those that take part


def _longest_waits(k: int, every_nth: int) -> list[int]:
    """For each turn, the most forwards between two that have it, counting those that take part only."""
    seen: dict[int, list[int]] = {turn: [0] for turn in range(k)}
    for i in range(1, FORWARDS + 1):
        seen[turn_of(7 + i * every_nth, k)].append(i)
    ends = ([*numbers, FORWARDS + 1] for numbers in seen.values())
    return [max(b - a for a, b in pairwise(numbers)) for numbers in ends]


def test_without_a_limit_every_forward_checks_everything() -> None:
    assert {turn_of(forward, 1) for forward in range(100)} == {0}


def test_device_and_host_take_the_low_half_of_long_forward_numbers_alike() -> None:
    assert turn_of(2**40 + 5, 7) == turn_of(2**40 + 5 - 2**64, 7) < 7


@pytest.mark.parametrize("every_nth", range(1, 9))
def test_every_turn_comes(every_nth: int) -> None:
    bound = 2 if every_nth == 1 else 6
    for k in range(2, 65):
        assert max(_longest_waits(k, every_nth)) <= bound * k


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
