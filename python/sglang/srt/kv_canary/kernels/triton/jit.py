"""Compiles the kernels with Triton where there is a GPU, and interprets them on CPU tensors where there is none.

Interpretation needs no environment variable and leaves the kernels of other packages alone, so that one test
process can hold both an SGLang engine and interpreted canary kernels.
"""

from __future__ import annotations

import os

import torch

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _sum_combine
from triton.runtime.interpreter import InterpretedFunction

from ...compile_folder import COMPILES_ENV

_HAS_GPU = COMPILES_ENV in os.environ or torch.cuda.is_available()
INTERPRET = triton.knobs.runtime.interpret or not _HAS_GPU

_compiled: list[
    triton.JITFunction
] = []  # in order of definition: mostly those that are called before their callers


class _Interpreted(InterpretedFunction):
    def __call__(self, *args, **kwargs):
        # The running kernel has patched `tl` already; Triton does it again per call, at 0.3 ms.
        return self.rewrite()(*args, **kwargs)


def jit(fn=None, **options):
    """`triton.jit`, or its interpreter when INTERPRET."""
    if fn is None:
        return lambda function: jit(function, **options)
    if INTERPRET:
        return _Interpreted(fn, **options)
    compiled = triton.jit(fn, **options)
    _compiled.append(compiled)
    return compiled


def settle_cache_keys() -> None:
    """Make what Triton's cache knows all functions by the same in every process. Call it once all are defined.

    Triton's key of a function holds the constants of those that it calls, but only of those whose keys it knows by
    then. So the key depends on what was compiled before, unless called functions come first.
    """
    for function in _compiled:
        function.cache_key  # noqa: B018  (kept by Triton)


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
