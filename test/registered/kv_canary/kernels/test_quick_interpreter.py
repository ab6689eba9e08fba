"""The quick interpreter, which runs all interpreted kernels of these tests, computes what Triton's own does."""

import sys
from collections.abc import Callable

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.kernels.triton.jit import INTERPRET, jit
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.testing.quick_interpreter import tritons_own
from sglang_kv_canary_rigs.kernel_cases import (
    ContentShape,
    Pool,
    Twin,
    kernel_device,
    make_group,
    make_state,
)

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

pytestmark = [
    pytest.mark.skipif(not INTERPRET, reason="compiled kernels need no interpreter"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0"),
]


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compares the tensors of two runs of a function: with the quick interpreter, and as Triton has it."""

    def compare(run: Callable[[], list[torch.Tensor]]) -> None:
        quick = [run(), run()]  # noted, and repeated
        for name, own in tritons_own.items():
            monkeypatch.setattr(interpreter, name, own)
        expected = run()
        for found in quick:
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

    return compare


def damaged_history() -> list[torch.Tensor]:
    pool = Pool(kernel_device(), 900, 512, 6)
    twin = Twin(make_group(900, content=ContentShape((24, 40))), make_state(request_rows=6))
    plans = [pool.extend({1: 300, 2: 7}, known=True), pool.decode([1, 2])]
    plans += [pool.target_verify([2, 1], drafts=3), pool.pad(pool.decode([2]), 2)]
    for number, plan in enumerate(plans):
        twin.check_and_write(plan, Side.HEAD)
        twin.check_and_write(plan, Side.TAIL)
        twin.check_and_write_content(plan, ContentMode.ALL)
        twin.poke("k_head", int(pool.req_to_token[1, 40 + number]), 1, 5)
    state, group = twin.kernel_state, twin.kernel_group
    assert int(state.violations.total) > 0
    tensors = [group.k_head, group.k_tail, group.v_head, group.v_tail]
    return [*tensors, state.counters, state.violations.rows, state.summary]


def test_kernels_write_the_same(both_ways):
    both_ways(damaged_history)


@jit
def arithmetic_kernel(numbers, small, out, shift, BLOCK: tl.constexpr):
    """Types that are cast, blocks that are broadcast, one value twice, constants that differ in value or type only."""
    first = tl.program_id(0) * BLOCK
    lane = first + tl.arange(0, BLOCK)
    x = tl.load(numbers + lane, mask=lane < 40, other=-7)
    y = tl.load(small + lane)
    total = x + x + y * 3 + y * 4 + (y.to(tl.int64) << shift) - (x >> 3)
    total ^= x // 5 + x % 7 + x.to(tl.uint64).to(tl.int64)
    total = tl.where((x > y) & (y != 2), total, tl.full([BLOCK], 1, tl.int64))
    table = x[:, None] * 2 + y[None, :]
    total += tl.reduce(table, 1, interpreter.tl.standard._sum_combine)
    flag = (x == 1) | (y < True)
    tl.store(out + lane, tl.where(flag, total * 1, total + 1), mask=lane != 5)
    if first == 0:
        tl.atomic_add(out + 63, 1)


def test_arithmetic(both_ways):
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(-(1 << 62), 1 << 62, (64,), generator=generator)
    small = torch.randint(-99, 99, (64,), generator=generator, dtype=torch.int32)

    def run() -> list[torch.Tensor]:
        outs = [torch.zeros(64, dtype=torch.int64) for _ in range(3)]
        for out, shift in zip(outs, (1, 2, 1 << 33), strict=True):
            arithmetic_kernel[(4,)](numbers, small, out, shift % 60, BLOCK=16)
        assert not torch.equal(outs[0], outs[1])
        return outs

    both_ways(run)


@interpreter.InterpretedFunction
def halved(x):
    """Called as the device functions of other packages are."""
    return tl.where(x > 0, x // 2, 0)


@jit
def nested_kernel(numbers, out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    x = halved(tl.load(numbers + lane))
    tl.store(out + lane, halved(x) + tl.where(x > 9, 1, 0))


def test_device_functions(both_ways):
    numbers = torch.randint(-999, 999, (16,), generator=torch.Generator().manual_seed(2))

    def run() -> list[torch.Tensor]:
        before = {part: dict(vars(part)) for part in (tl, tl.core, tl.math, tl.tensor)}
        out = torch.zeros_like(numbers)
        nested_kernel[(1,)](numbers, out, BLOCK=16)
        changed = [n for part, was in before.items() for n in was if vars(part)[n] is not was[n]]
        assert changed == [], "a kernel leaves Triton's language as it was"
        return [out]

    both_ways(run)


@jit
def wrong_kernel(words, BLOCK: tl.constexpr):
    tl.store(words + tl.arange(0, BLOCK), tl.load(words) + words)


def test_what_triton_refuses_is_refused_each_time():
    for _ in range(3):
        with pytest.raises(InterpreterError, match="IncompatibleTypeErrorImpl"):
            wrong_kernel[(1,)](torch.zeros(8, dtype=torch.float32), BLOCK=4)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
