"""Compiles the kernels with Triton where there is a GPU, and interprets them on CPU tensors where there is none.

Interpretation needs no environment variable and leaves the kernels of other packages alone, so that one test
process can hold both an SGLang engine and interpreted canary kernels.
"""

from __future__ import annotations

import torch

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _sum_combine
from triton.runtime.interpreter import InterpretedFunction

INTERPRET = triton.knobs.runtime.interpret or not torch.cuda.is_available()


class _Interpreted(InterpretedFunction):
    def __call__(self, *args, **kwargs):
        # The running kernel has patched `tl` already; Triton does it again per call, at 0.3 ms.
        return self.rewrite()(*args, **kwargs)


def jit(fn=None, **options):
    """`triton.jit`, or its interpreter when INTERPRET."""
    if fn is None:
        return lambda function: jit(function, **options)
    return _Interpreted(fn, **options) if INTERPRET else triton.jit(fn, **options)


# `tl.sum` and its kin are compiled functions of Triton's library, which our interpreter cannot call; the
# built-ins under them work in both worlds.
@jit
def sum_of(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _sum_combine)


@jit
def max_of(x, axis: tl.constexpr):
    return tl.reduce(x, axis, _elementwise_max)


@jit
def cumsum_of(x):
    """Inclusive prefix sum of a 1-D tensor."""
    return tl.associative_scan(x, 0, _sum_combine)
