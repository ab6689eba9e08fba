"""Launches kernels by name. A variant that has run before is launched without Triton's own look-up.

That look-up takes most of a launch's host time. It looks at every argument twice, and asks the driver about each
pointer. `variant_of` says what tells variants apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

import triton

from ...capacities import MOST_REQUESTS
from .compile_ahead import AHEAD
from .jit import INTERPRET

__all__ = ["KernelLauncher", "variant_of"]

# `CompiledKernel[grid](...)` takes all arguments of the kernel, and pointers as integers. Read in these versions.
_KNOWN_TRITON = ("3.6",)
CAN_SKIP = not INTERPRET and triton.__version__.rpartition(".")[0] in _KNOWN_TRITON
_ALIGNED = 16  # bytes; Triton compiles a variant of its own for pointers that are multiples of it
_INT32 = range(-(2**31), 2**31)
# Lengths of the vectors that hold the requests of a batch, the kernels' BATCH. Few: each is compiled on its own.
BATCH_SIZES = (32, 256, 1024, 4096, MOST_REQUESTS)


class KernelLauncher:
    """Launches `kernel` with arguments by name, compile-time ones included. Names that it does not have are ignored."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        # Triton is given them in order: it copies what has a name three times a launch.
        self._in_order = itemgetter(*kernel.arg_names)
        self._only_types = _only_types(kernel) if CAN_SKIP else ()
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._begun: dict[tuple[Any, ...], Any] = {}  # variants that threads compile

    def __call__(self, grid: tuple[int], num_warps: int, arguments: dict[str, Any]) -> None:
        values = self._in_order(arguments)
        if not CAN_SKIP:
            self._kernel[grid](*values, num_warps=num_warps)
            return
        if AHEAD.active:
            self._begin(grid, num_warps, arguments)
            return
        variant, plain = variant_of(values, self._only_types)
        device = values[0].device.index  # every kernel's first argument is a tensor
        key = (device, num_warps, *variant)
        compiled = self._compiled.get(key)
        if compiled is None:
            if (begun := self._begun.pop(key, None)) is not None:
                begun.result()  # Triton keeps it, and the launch below finds it
            self._compiled[key] = self._kernel[grid](*values, num_warps=num_warps)
        else:
            compiled[(grid[0], 1, 1)](*plain)

    def _begin(self, grid: tuple[int], num_warps: int, arguments: dict[str, Any]) -> None:
        """Compile the variant of `arguments` in a thread, and those of smaller batches if AHEAD asks for them."""
        sizes = [arguments.get("BATCH")]
        if AHEAD.smaller_batches and "BATCH" in self._kernel.arg_names:
            sizes += [size for size in BATCH_SIZES if size < sizes[0]]
        for size in sizes:
            values = self._in_order({**arguments, "BATCH": size})
            variant, _ = variant_of(values, self._only_types)
            key = (values[0].device.index, num_warps, *variant)
            if key not in self._compiled and key not in self._begun:
                kernel = self._kernel.warmup(*values, grid=grid, num_warps=num_warps)
                if hasattr(kernel, "result"):  # otherwise Triton has it already
                    self._begun[key] = kernel


def _only_types(kernel: Any) -> tuple[bool, ...]:
    """Which parameters of `kernel` are compiled for the type of an integer, and not for its value."""
    return tuple(p.do_not_specialize and not p.is_constexpr for p in kernel.params)


def variant_of(
    values: Sequence[Any], only_types: Sequence[bool]
) -> tuple[tuple[Any, ...], list[Any]]:
    """(what Triton compiles for, the arguments with pointers as integers) of the arguments `values`.

    Of a tensor: its dtype and whether it is aligned. Of an integer: its type where `only_types`, else its value.
    """
    variant: list[Any] = []
    plain: list[Any] = []
    for value, only_type in zip(values, only_types, strict=True):
        if isinstance(value, torch.Tensor):
            pointer = value.data_ptr()
            variant.append((value.dtype, pointer % _ALIGNED == 0))
            plain.append(pointer)
        else:
            variant.append(value in _INT32 if only_type and value is not None else value)
            plain.append(value)
    return tuple(variant), plain
