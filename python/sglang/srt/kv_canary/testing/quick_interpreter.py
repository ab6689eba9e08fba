"""Triton's interpreter works out the same types for every operation, which takes most of its time: here, once each.

Kernels compute what they would. It is a plugin of SGLang, too, for servers whose kernels are interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from triton.language import core
from triton.runtime import interpreter

from .replayed_operations import replaying

__all__ = ["quick_interpreter", "tritons_patch_attr"]

tritons_patch_attr = interpreter._patch_attr

_np_dtypes: dict[str, Any] = {}
_original_np_dtype = interpreter._get_np_dtype
_original_to_tensor = interpreter.interpreter_semantic.to_tensor
_replaying = cache(replaying)


def quick_interpreter() -> None:
    """For the rest of this process."""
    interpreter._get_np_dtype = _np_dtype
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block_type
    interpreter._patch_attr = _patch_attr
    interpreter.interpreter_semantic.to_tensor = _to_tensor


def _np_dtype(dtype: Any) -> Any:
    found = _np_dtypes.get(dtype.name)
    if found is None:
        found = _np_dtypes[dtype.name] = _original_np_dtype(dtype)
    return found


@cache
def _shape_and_count(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    """Those of a tensor. Nobody changes them."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


@cache
def _block(element: str, shape: tuple[int, ...]) -> tuple[core.tuple, int, str]:
    """Shape, count and name of a block type."""
    sizes = core.tuple(shape)
    return sizes, core.validate_block_shape(sizes), f"<{sizes}, {element}>"


def _init_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    shape = tuple(type.shape.values) if type.is_block() else ()
    self.shape, self.numel = _shape_and_count(shape)


def _init_block_type(self: core.block_type, element_ty: core.dtype, shape: Sequence[Any]) -> None:
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _block(str(element_ty), sizes)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    scope.set_attr(obj, name, _replaying(member, builder))


def _to_tensor(value: Any, check_type: bool = True) -> Any:
    """Each assignment in a kernel asks for this, mostly of a tensor."""
    return value if type(value) is core.tensor else _original_to_tensor(value, check_type)
