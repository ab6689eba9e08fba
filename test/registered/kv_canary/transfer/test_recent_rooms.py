"""Marks on requests that are being transferred: taken once, and few of those that nobody takes."""

from __future__ import annotations

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.transfer import recent_rooms
from sglang_kv_canary.transfer.recent_rooms import RecentRooms

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


def test_a_mark_is_taken_once() -> None:
    rooms = RecentRooms()
    rooms.mark(("session", 7))
    assert not rooms.take(("session", 8))
    assert not rooms.take(("other", 7))
    assert [rooms.take(("session", 7)) for _ in range(2)] == [True, False]


def test_marks_that_nobody_takes_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_rooms, "MOST_MARKED", 3)
    rooms = RecentRooms()
    for room in (0, 1, 0, 2, 3):  # 0 is marked again, and 1 is then the oldest
        rooms.mark(room)
    assert [rooms.take(room) for room in range(4)] == [True, False, True, True]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
