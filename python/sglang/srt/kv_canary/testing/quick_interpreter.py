"""What takes most of the time of Triton's interpreter is done once here: types, and what to replace in its language.

Kernels compute what they would. It is a plugin of SGLang, too, for servers whose kernels are interpreted.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

from triton import language
from triton.language import core
from triton.runtime import interpreter

from .replayed_operations import replaying

__all__ = ["quick_interpreter", "tritons_own"]

# What Triton has in place of functions here.
tritons_own = {
    name: getattr(interpreter, name) for name in ("_patch_attr", "_patch_builtin", "_patch_lang")
}

_LANGUAGE = frozenset(map(id, (language, core)))
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
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
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


@cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    """The operations in a module or class of Triton's language, as they are before a kernel runs."""
    return [(name, m) for name, m in inspect.getmembers(package) if core.is_builtin(m)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(package):
        interpreter._patch_attr(package, name, member, builder, scope)


class _Running:
    """The scope of the kernel that runs. Triton patches its language again for each call of a device function."""

    _patched: ClassVar[frozenset[int]] = frozenset()  # parts of the language, by id

    def __init__(self, scope: Any, parts: frozenset[int]) -> None:
        self._scope = scope
        _Running._patched = parts

    @classmethod
    def covers(cls, parts: frozenset[int]) -> bool:
        return bool(parts) and parts <= cls._patched

    def restore(self) -> None:
        _Running._patched = frozenset()
        self._scope.restore()


def _patch_lang(fn: Any) -> _Running | None:
    """Nothing for a device function, which has no use for the scope, of a kernel that sees as much of the language."""
    parts = _LANGUAGE.intersection(map(id, fn.__globals__.values()))
    if _Running.covers(parts):
        return None
    return _Running(tritons_own["_patch_lang"](fn), parts)


def _to_tensor(value: Any, check_type: bool = True) -> Any:
    """Each assignment in a kernel asks for this, mostly of a tensor."""
    return value if type(value) is core.tensor else _original_to_tensor(value, check_type)
