"""One variant of a kernel as plain data, so that another process can compile it: what Triton makes of the arguments.

It follows `JITFunction.run` of the Triton versions that KernelLauncher knows. The hash is that of Triton's cache.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache, cached_property
from importlib import import_module
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import create_function_from_signature

# What the arguments are compiled for depends on the vendor, not on the generation.
_ANY_GENERATION = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Variant:
    """A kernel with the types, constants and alignments that it is compiled for."""

    module: str
    kernel: str
    num_warps: int
    signature: tuple[tuple[str, str], ...]  # (parameter, Triton's name of its type)
    constants: tuple[tuple[tuple[int, ...], Any], ...]  # (path of the parameter, value)
    attributes: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, kernel: Any, values: Sequence[Any], num_warps: int) -> Variant:
        """The variant that a launch of `kernel`, a JITFunction, with all arguments `values` needs."""
        backend = make_backend(_ANY_GENERATION)
        bound, specialization, _ = _binder(kernel)(*values)
        _, signature, constants, attributes = kernel._pack_args(
            backend, {}, bound, specialization, None
        )
        return cls(
            kernel.module,
            kernel.__name__,
            num_warps,
            tuple(signature.items()),
            tuple(constants.items()),
            tuple(attributes.items()),
        )

    @classmethod
    def from_text(cls, text: str) -> Variant:
        """The variant whose `text` this is. Raises ValueError or TypeError for any other text."""
        return cls(*ast.literal_eval(text))

    @cached_property
    def text(self) -> str:
        return repr(astuple(self))

    @cached_property
    def name(self) -> str:
        """The same in every process for the same variant."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]

    def hash(self, target: GPUTarget) -> str:
        """What Triton's cache knows it by on `target`, in this process with its environment."""
        source, backend, options = self._prepared(target)
        variables = triton.compiler.compiler.get_cache_invalidating_env_vars()
        key = get_cache_key(source, backend, options, variables)
        return hashlib.sha256(key.encode()).hexdigest()

    def compile(self, target: GPUTarget) -> Any:
        """The compiled kernel, from Triton's cache if it is there. Needs no GPU."""
        source, _, options = self._prepared(target)
        return triton.compile(source, target=target, options=options.__dict__)

    def build_launcher(self, target: GPUTarget, compiled: Any) -> None:
        """Compile the C function that launches it, which Triton does at a first launch. Needs the driver's library."""
        from triton.backends.nvidia.driver import CudaLauncher

        source, _, _ = self._prepared(target)
        CudaLauncher(source, compiled.metadata)

    def _prepared(self, target: GPUTarget) -> tuple[ASTSource, Any, Any]:
        """(source, backend, options), as JITFunction has them."""
        kernel = getattr(import_module(self.module), self.kernel)
        attributes = dict(self.attributes)
        source = ASTSource(kernel, dict(self.signature), dict(self.constants), attributes)
        backend = make_backend(target)
        options = {
            "num_warps": self.num_warps,
            "debug": kernel.debug or triton.knobs.runtime.debug,
            "instrumentation_mode": triton.knobs.compilation.instrumentation_mode,
        }
        return source, backend, backend.parse_options(options)


@cache
def _binder(kernel: Any) -> Any:
    backend = make_backend(_ANY_GENERATION)
    return create_function_from_signature(kernel.signature, kernel.params, backend)
