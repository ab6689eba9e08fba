"""Room for frames: no call below it pays the system for memory, at whatever depth a loop runs."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.host_code import with_room_for_frames
from sglang_kv_canary.host_code.frame_room import ROOM_BYTES

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

CALLS = 100
CHUNK_BYTES = 16 * 1024  # of CPython's frames


def _down(levels: int) -> int:
    return 0 if levels == 0 else _down(levels - 1)


def _loop() -> float:
    """Page faults for each call of the loop. A chunk that is new has one at least."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        _down(8)
    return (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) / CALLS


def _loop_at(depth: int) -> float:
    return _loop() if depth == 0 else _loop_at(depth - 1)


def _most_faults(frames_bytes: int) -> float:
    """Of loops at all depths, up to so many bytes of frames."""
    code = _loop_at.__code__
    frame = 8 * (code.co_nlocals + code.co_stacksize + 10)  # 10: what CPython notes of a frame
    return max(_loop_at(depth) for depth in range(0, frames_bytes // frame, 3))


@pytest.fixture(autouse=True)
def frames_may_be_many() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + ROOM_BYTES // 64)
    yield
    sys.setrecursionlimit(limit)


def test_a_loop_pays_at_no_depth() -> None:
    assert with_room_for_frames(_most_faults, ROOM_BYTES - 2048) < 0.5


def test_without_it_a_loop_pays_at_some_depth() -> None:
    """So the test above can fail."""
    if not (3, 11) <= sys.version_info < (3, 13):
        pytest.skip("other frames, or one chunk is kept; lifted by CPython 3.11 and 3.12")
    assert _most_faults(2 * CHUNK_BYTES) >= 1


def test_it_calls_what_it_is_given() -> None:
    def call(*args: object, **kwargs: object) -> tuple[object, ...]:
        return args, kwargs

    assert with_room_for_frames(call, 1, call=2, key=3) == ((1,), {"call": 2, "key": 3})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
