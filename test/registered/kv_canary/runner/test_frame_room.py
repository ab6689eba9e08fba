"""Room for frames: no call in it pays the system for memory, at whatever depth a loop runs."""

from __future__ import annotations

import mmap
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
NOTED = 9 if sys.version_info < (3, 14) else 10  # words of a frame that are no local and no value


def _down(levels: int) -> int:
    return 0 if levels == 0 else _down(levels - 1)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _loop() -> float:
    """Page faults for each call of the loop. A chunk that is new has one at least."""
    before = _faults()
    for _ in range(CALLS):
        _down(8)
    return (_faults() - before) / CALLS


def _loop_at(depth: int) -> float:
    return _loop() if depth == 0 else _loop_at(depth - 1)


def _first_that_pays(most_bytes: int) -> int:
    """Bytes of frames above the first loop that has a fault in each call. `most_bytes`: none has."""
    code = _loop_at.__code__
    frame = 8 * (code.co_nlocals + code.co_stacksize + NOTED)
    depths = range(0, most_bytes // frame, 3)
    return next((depth * frame for depth in depths if _loop_at(depth) > 0.5), most_bytes)


@pytest.fixture(autouse=True)
def frames_may_be_many() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 2 * ROOM_BYTES // 64)
    yield
    sys.setrecursionlimit(limit)


@pytest.fixture(autouse=True)
def faults_are_counted() -> None:
    before = _faults()
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 1
    if _faults() == before:
        pytest.skip("this kernel counts no page faults of threads; lifted by Linux itself")


def test_without_it_a_loop_pays_at_some_depth() -> None:
    """So the test below can fail."""
    _skip_without_chunks()
    assert _first_that_pays(2 * CHUNK_BYTES) < 2 * CHUNK_BYTES


def test_the_first_loop_that_pays_is_beyond_the_room() -> None:
    _skip_without_chunks()
    first = with_room_for_frames(_first_that_pays, 2 * ROOM_BYTES)
    inside = 9 * 8 * (NOTED + 6)  # `_down`, nine times
    assert ROOM_BYTES - inside - 512 < first < ROOM_BYTES + CHUNK_BYTES


def _skip_without_chunks() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("frames of CPython 3.10 are objects; lifted by CPython 3.11 and 3.12")
    if sys.version_info >= (3, 13) and _first_that_pays(2 * CHUNK_BYTES) == 2 * CHUNK_BYTES:
        pytest.skip("this CPython keeps a chunk; lifted by CPython 3.11 and 3.12")


def test_it_calls_what_it_is_given() -> None:
    def call(*args: object, **kwargs: object) -> tuple[object, ...]:
        return args, kwargs

    assert with_room_for_frames(call, 1, call=2, key=3) == ((1,), {"call": 2, "key": 3})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
