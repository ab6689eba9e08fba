"""Which variants of the kernels launches would make Triton compile, by its own rules, without a GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from sglang_kv_canary.kernels.triton.jit import _Interpreted

Variant = tuple[Any, ...]


@functools.cache
def _binder(kernel: _Interpreted) -> Any:
    compiled = JITFunction(kernel.fn, **kernel.kwargs)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(compiled.signature, compiled.params, backend)


class LaunchVariants:
    """While it is installed, the kernels are not run; every launch adds its variant to `seen`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[Variant] = set()

        def run(kernel: _Interpreted, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
            _, arguments, options = _binder(kernel)(*args, **keywords)
            named = zip(kernel.arg_names, arguments, strict=True)
            self.seen.add((kernel.__name__, *named, *sorted(options.items())))

        monkeypatch.setattr(_Interpreted, "run", run)

    def take(self) -> set[Variant]:
        """What was seen since the last time."""
        seen, self.seen = self.seen, set()
        return seen


def missing(served: set[Variant], compiled: set[Variant]) -> list[str]:
    """What of `served` was not compiled, each as its kernel and its difference from the nearest that was."""
    found = []
    for variant in sorted(served - compiled, key=repr):
        others = [set(c) for c in compiled if c[0] == variant[0]] or [{variant[0]}]
        found.append(f"{variant[0]}: {min((set(variant) - other for other in others), key=len)}")
    return found
