"""Launches kernels by name. A variant that has run before is launched without Triton's own look-up.

That look-up takes most of a launch's host time. It looks at every argument twice, and asks the driver about each
pointer. `variant_of` says what tells variants apart. Arguments that never change are looked at once, and tensors that
several launches of a forward take once for all of them (`Pointer`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ...capacities import MOST_REQUESTS
from ...host_code import HOST
from ...host_code.twins import CompiledLaunch
from .compile_ahead import AHEAD, Begun
from .direct_launch import direct_launch, is_known
from .jit import INTERPRET
from .overlap import WAITS

__all__ = ["FixedArguments", "KernelLauncher", "Pointer", "variant_of"]

CAN_SKIP = not INTERPRET and is_known()
# Lengths of the vectors that hold the requests of a batch, the kernels' BATCH. Few: each is compiled on its own.
BATCH_SIZES = (32, 256, 1024, 4096, MOST_REQUESTS)


class Pointer(NamedTuple):
    """A tensor argument that is looked at once, for all launches that take it. It must keep its address.

    `HOST.pointers_to` makes them.
    """

    tensor: torch.Tensor
    address: int
    variant: Hashable  # see `host_code.twins.launch_arguments`


_TYPES = (Pointer, torch.Tensor)


class FixedArguments:
    """Arguments, by name, that are the same objects in every launch that is given them. Tensors keep their addresses.

    They serve one KernelLauncher, whose launches give the same further names each time. They win over what a launch
    gives by their names.
    """

    __slots__ = ("arguments", "rest")

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.rest: _Rest | None = None  # known after the first launch


class _Rest:
    """Where the arguments that change go, and the variants that their launches have had."""

    __slots__ = ("compiled", "count", "shape")

    def __init__(self, launcher: KernelLauncher, fixed: Mapping[str, Any], names: Collection[str]):
        """`fixed`, `names`: arguments that stay, names of those that each launch gives."""
        self.count = len(names)
        place_of = {name: i for i, name in enumerate(launcher.names)}
        # In their order, in which each launch gives them
        names = [name for name in names if name in place_of and name not in fixed]
        places = bytes([place_of[name] for name in names])
        changing = set(names)
        fixed_values = [None if name in changing else fixed[name] for name in launcher.names]
        _, plain = variant_of(fixed_values, launcher.only_types)
        # What `HOST.launch_arguments` takes first
        self.shape = (
            tuple(names),
            bytes([launcher.only_types[place] for place in places]),
            places,
            plain,
            _TYPES,
        )
        self.compiled: dict[tuple[Any, ...], CompiledLaunch | None] = {}


class KernelLauncher:
    """Launches `kernel` with arguments by name, compile-time ones included. Names that it does not have are ignored."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.names: tuple[str, ...] = tuple(kernel.arg_names)
        # Triton is given them in order: it copies what has a name three times a launch.
        self._in_order = itemgetter(*self.names)
        self.only_types = _only_types(kernel) if CAN_SKIP else ()
        self._compiled: dict[tuple[Any, ...], CompiledLaunch | None] = {}
        self._begun: dict[tuple[Any, ...], Begun] = {}  # variants that are being compiled
        self._waits = self.names.index(WAITS) if WAITS in self.names else None

    def __call__(
        self,
        grid: tuple[int],
        num_warps: int,
        arguments: Mapping[str, Any],
        fixed: FixedArguments | None = None,
    ) -> None:
        """Launch on the current stream. `fixed` ones win over `arguments` of the same name."""
        if fixed is None or not CAN_SKIP or AHEAD.active:
            whole = arguments if fixed is None else {**arguments, **fixed.arguments}
            self._launch(grid, num_warps, whole)
            return
        rest = fixed.rest
        if rest is None or rest.count != len(arguments):
            rest = fixed.rest = _Rest(self, fixed.arguments, arguments)
        if not HOST.launch(rest.shape, rest.compiled, grid[0], num_warps, arguments):
            key, _ = HOST.launch_arguments(*rest.shape, num_warps, arguments)
            rest.compiled[key] = self._launch(grid, num_warps, {**arguments, **fixed.arguments})

    def _launch(
        self, grid: tuple[int], num_warps: int, arguments: Mapping[str, Any]
    ) -> CompiledLaunch | None:
        """Returns the compiled variant, if it is known."""
        values = self._values(arguments)
        if not CAN_SKIP:
            self._kernel[grid](*values, num_warps=num_warps)
            return None
        if AHEAD.active:
            self._begin(num_warps, arguments)
            return None
        variant, plain = variant_of(values, self.only_types)
        device = values[0].device.index  # every kernel's first argument is a tensor
        key = (device, num_warps, *variant)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled(grid[0], plain)
            return compiled
        begun = self._begun.pop(key, None)
        with nullcontext() if begun is None else begun.at_hand():
            compiled = self._compiled[key] = self._compile(grid, num_warps, values)
        return compiled

    def _compile(
        self, grid: tuple[int], num_warps: int, values: Sequence[Any]
    ) -> CompiledLaunch | None:
        """Compile a variant, and launch it. None: a hook of Triton's has taken the launch over."""
        compiled = self._kernel[grid](*values, num_warps=num_warps)
        if compiled is None:
            return None
        begins_early = self._waits is not None and bool(values[self._waits])
        return direct_launch(compiled, values[0].device.index, begins_early)

    def _values(self, arguments: Mapping[str, Any]) -> list[Any]:
        """All arguments of the kernel in its order, tensors as themselves."""
        values = self._in_order(arguments)
        return [value.tensor if type(value) is Pointer else value for value in values]

    def _begin(self, num_warps: int, arguments: Mapping[str, Any]) -> None:
        """Begin to compile the variant of `arguments`, and those of smaller batches if AHEAD asks for them."""
        sizes = [arguments.get("BATCH")]
        if AHEAD.smaller_batches and "BATCH" in self._kernel.arg_names:
            sizes += [size for size in BATCH_SIZES if size < sizes[0]]
        for size in sizes:
            values = self._values({**arguments, "BATCH": size})
            variant, _ = variant_of(values, self.only_types)
            key = (values[0].device.index, num_warps, *variant)
            if key not in self._compiled and key not in self._begun:
                begun = AHEAD.begin(self._kernel, values, num_warps)
                if begun is not None:
                    self._begun[key] = begun


def _only_types(kernel: Any) -> tuple[bool, ...]:
    """Which parameters of `kernel` are compiled for the type of an integer, and not for its value."""
    return tuple(p.do_not_specialize and not p.is_constexpr for p in kernel.params)


def variant_of(
    values: Sequence[Any], only_types: Sequence[bool]
) -> tuple[tuple[Any, ...], list[Any]]:
    """(what Triton compiles for, the arguments with pointers as integers) of the arguments `values`.

    Of a tensor: its dtype and whether it is aligned. Of an integer: its type where `only_types`, else its value.
    """
    names = range(len(values))
    shape = tuple(names), bytes(only_types), bytes(names), [None] * len(values), _TYPES
    variant, plain = HOST.launch_arguments(*shape, 0, dict(enumerate(values)))
    return variant[1:], plain
