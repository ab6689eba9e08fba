"""A request's first forward in a row is told from its later ones, whatever becomes of rows and requests."""

from __future__ import annotations

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.row_owners import RowOwners
from sglang_kv_canary_rigs.rig_request import RigRequest

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


def test_chunks_of_a_request_are_not_new() -> None:
    owners, request = RowOwners(), RigRequest(3)
    assert owners.extend(request, 5, 10)
    assert not owners.extend(request, 15, 10)
    assert not owners.extend(request, 40, 1)  # after decodes, in a mixed batch


def test_another_request_in_the_row_is_new() -> None:
    owners, first, second = RowOwners(), RigRequest(3), RigRequest(3)
    owners.extend(first, 0, 10)
    assert owners.extend(second, 10, 5)
    assert not owners.extend(second, 15, 5)


def test_another_row_is_new() -> None:
    owners, request = RowOwners(), RigRequest(3)
    owners.extend(request, 0, 10)
    request.req_pool_idx = 4
    assert owners.extend(request, 10, 5)


def test_a_row_that_was_given_back_is_new_for_the_same_request() -> None:
    """A retracted request may get its own row again."""
    owners, request = RowOwners(), RigRequest(3)
    owners.extend(request, 0, 10)
    owners.forget(3)
    assert owners.extend(request, 10, 5)


def test_a_row_that_became_shorter_is_new() -> None:
    owners, request = RowOwners(), RigRequest(3)
    owners.extend(request, 0, 10)
    assert owners.extend(request, 6, 5)


def test_a_request_that_is_gone_is_not_taken_for_the_next_one() -> None:
    owners, request = RowOwners(), RigRequest(3)
    owners.extend(request, 0, 10)
    del request
    assert owners.extend(RigRequest(3), 10, 5)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
