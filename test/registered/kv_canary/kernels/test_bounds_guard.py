"""The guard that stands around every interpreted kernel of these tests sees what lies outside, and nothing else."""

import sys

import pytest
import torch
import triton.language as tl
from triton.runtime.errors import InterpreterError

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.kernels.triton.content import content_fingerprint
from sglang_kv_canary.kernels.triton.jit import INTERPRET, jit
from sglang_kv_canary_rigs.kernel_cases import ContentShape, make_group

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

pytestmark = pytest.mark.skipif(not INTERPRET, reason="compiled kernels: use compute-sanitizer")


@jit
def shift_kernel(source, target, size, offset, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(
        target + lane, tl.load(source + lane + offset, mask=lane < size, other=0), mask=lane < size
    )


@jit
def count_kernel(counters, place):
    tl.atomic_add(counters + place, 1)


@jit
def take_kernel(locks, place):
    tl.atomic_cas(locks + place, tl.full([], 0, tl.int64), tl.full([], 1, tl.int64))


def shift(size: int, offset: int, length: int = 8) -> None:
    source, target = torch.arange(8)[:length], torch.zeros(8, dtype=torch.int64)
    shift_kernel[(1,)](source, target, size, offset, BLOCK=16)
    assert target[:size].tolist() == list(range(offset, offset + size))


@pytest.mark.parametrize(("size", "offset"), [(8, 0), (5, 3), (0, 999)])
def test_inside_is_silent_also_where_masked_lanes_are_not(size, offset):
    shift(size, offset)


@pytest.mark.parametrize(
    ("size", "offset", "length"), [(8, 1, 8), (1, -1, 8), (1, 0, 0), (8, 0, 7)]
)
def test_outside_is_told(size, offset, length):
    with pytest.raises(InterpreterError, match="shift_kernel: masked_load of 8 bytes at 0x"):
        shift(size, offset, length)


def test_stores_and_atomics_are_seen():
    with pytest.raises(InterpreterError, match="masked_store of 8 bytes"):
        shift_kernel[(1,)](torch.arange(16), torch.zeros(8, dtype=torch.int64), 9, 0, BLOCK=16)
    for kernel, what in ((count_kernel, "atomic_rmw"), (take_kernel, "atomic_cas")):
        words = torch.zeros(4, dtype=torch.int64)
        kernel[(1,)](words, 3)
        assert words.tolist() == [0, 0, 0, 1]
        with pytest.raises(InterpreterError, match=f"{what} of 8 bytes"):
            kernel[(1,)](words, 4)


def test_content_rows_are_allowed_as_far_as_they_go():
    sources = make_group(8, content=ContentShape((32,))).k_content
    content_fingerprint(sources, torch.arange(8), ContentMode.ALL)
    with pytest.raises(InterpreterError, match="fingerprint_kernel: masked_load"):
        content_fingerprint(sources, torch.tensor([8]), ContentMode.ALL)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
