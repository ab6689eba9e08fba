"""What Triton's front end makes of an operation depends on types and constants only: here, it is worked out once.

The first time, Triton's own code runs, and the calls that it makes to the interpreter's builder are noted. An
operation with the same types and constants then makes the same calls with its own values. Calls that nobody needs
(Triton checks for overflows only when it debugs) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["replaying"]

# Calls that touch nothing but their arguments, and give the same for the same ones.
PURE = ("get_int", "get_null_value", "create_int_cast", "create_splat", "create_broadcast")
PURE += ("create_and", "create_icmp", "create_add", "create_sub", "create_mul")
PLAIN = (bool, int, float, str, type(None))


class _NotPlainError(Exception):
    """An argument is neither a tensor nor a constant."""


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    places: tuple[int, ...]  # of its arguments among the values
    result: int  # the place of what it returns

    @property
    def is_pure(self) -> bool:
        return self.method.startswith(PURE) and self.method != "create_addptr"


class _Recorder:
    """The builder, with notes of the calls to it. Values have places: inputs first, then in the order of the calls."""

    def __init__(self, builder: InterpreterBuilder, inputs: Sequence[TensorHandle]) -> None:
        self._builder = builder
        self.values: list[Any] = list(inputs)
        self.calls: list[_Call] = []
        self.complete = True

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        if not callable(member):
            return member

        def noted(*args: Any) -> Any:
            result = member(*args)
            if isinstance(result, TensorHandle) or result is None:
                places = tuple(self._place(arg) for arg in args)
                self.calls.append(_Call(name, places, len(self.values)))
                self.values.append(result)
            elif not isinstance(result, core.dtype):
                self.complete = False
            return result

        return noted

    def _place(self, value: Any) -> int:
        if isinstance(value, TensorHandle):
            place = self.place_of(value)
            if place is not None:
                return place
            self.complete = False  # made by others than the builder
        if isinstance(value, (list, tuple)) and any(isinstance(v, TensorHandle) for v in value):
            self.complete = False
        self.values.append(value)
        return len(self.values) - 1

    def place_of(self, handle: TensorHandle) -> int | None:
        return next((i for i, value in enumerate(self.values) if value is handle), None)


class _Recipe:
    """The calls of one operation that are to be made each time, and the values that stay."""

    def __init__(self, recorder: _Recorder, inputs: int, result: core.tensor | None) -> None:
        self._result = -1 if result is None else recorder.place_of(result.handle)
        self._fields = None if result is None else {**vars(result), "handle": None}
        changing = set(range(inputs))  # places
        self._calls: list[tuple[str, tuple[int, ...], int]] = []
        for call in _needed(recorder.calls, self._result):
            stays = call.is_pure and changing.isdisjoint(call.places)
            if not stays or call.result == self._result:
                changing.add(call.result)
                self._calls.append((call.method, call.places, call.result))
        self._values = [
            None if place in changing else value
            for place, value in enumerate(recorder.values[inputs:], inputs)
        ]

    def replay(self, builder: InterpreterBuilder, inputs: Sequence[core.tensor]) -> Any:
        values = [*[tensor.handle for tensor in inputs], *self._values]
        for method, places, result in self._calls:
            values[result] = getattr(builder, method)(*[values[place] for place in places])
        if self._fields is None:
            return None
        tensor = core.tensor.__new__(core.tensor)
        tensor.__dict__.update(self._fields)
        tensor.handle = values[self._result]
        return tensor


def _needed(calls: Sequence[_Call], result: int) -> list[_Call]:
    """Without the pure calls whose results nobody uses."""
    used, needed = {result}, []
    for call in reversed(calls):
        if call.result in used or not call.is_pure:
            used.update(call.places)
            needed.append(call)
    return needed[::-1]


def replaying(member: Callable[..., Any], builder: InterpreterBuilder) -> Callable[..., Any]:
    """In place of `triton.runtime.interpreter`'s own wrapper of a function or method of Triton's language."""
    semantic = TritonSemantic(builder)
    recipes: dict[tuple[Any, ...], _Recipe | None] = {}

    def operation(*args: Any, _semantic: Any = None, **keywords: Any) -> Any:
        if _semantic is not None and isinstance(_semantic.builder, _Recorder):
            return member(*args, **keywords, _semantic=_semantic)  # a part of what is recorded
        inputs: list[core.tensor] = []
        try:
            key = tuple(_signature((*args, *keywords, *keywords.values()), inputs))
        except _NotPlainError:
            return member(*args, **keywords, _semantic=semantic)
        if (recipe := recipes.get(key)) is not None:
            return recipe.replay(builder, inputs)
        if key in recipes:
            return member(*args, **keywords, _semantic=semantic)
        recipes[key] = None
        result, recipes[key] = _record(member, builder, args, keywords)
        return result

    return operation


def _signature(values: Sequence[Any], inputs: list[core.tensor]) -> Iterator[Any]:
    """What an operation on `values` depends on. Tensors are added to `inputs`."""
    for value in values:
        kind = type(value)
        if kind is core.tensor:
            inputs.append(value)
            yield value.type.name
        elif kind in PLAIN:
            yield kind
            yield value
        elif kind is core.constexpr and type(value.value) is not core.tensor:
            yield kind
            yield from _signature((value.value,), inputs)
        elif kind in (list, tuple):
            yield len(value)
            yield from _signature(value, inputs)
        elif kind is slice:
            yield kind
            yield from _signature((value.start, value.stop, value.step), inputs)
        elif isinstance(value, core.dtype):
            yield core.dtype
            yield value.name
        else:
            raise _NotPlainError


def _record(
    member: Callable[..., Any], builder: InterpreterBuilder, args: Any, keywords: dict[str, Any]
) -> tuple[Any, _Recipe | None]:
    """What the operation returns, and its recipe if it can be replayed."""
    inputs: list[core.tensor] = []
    args = _with_own_handles(args, inputs)
    keywords = {name: _with_own_handles(value, inputs) for name, value in keywords.items()}
    recorder = _Recorder(builder, [tensor.handle for tensor in inputs])
    result = member(*args, **keywords, _semantic=TritonSemantic(recorder))
    if not recorder.complete or not (result is None or type(result) is core.tensor):
        return result, None
    if result is not None and recorder.place_of(result.handle) is None:
        return result, None
    return result, _Recipe(recorder, len(inputs), result)


def _with_own_handles(value: Any, inputs: list[core.tensor]) -> Any:
    """`value` with a handle of its own for each tensor in it: `x + x` has two inputs."""
    if type(value) in (list, tuple):
        return type(value)(_with_own_handles(one, inputs) for one in value)
    if type(value) is not core.tensor:
        return value
    handle = TensorHandle(value.handle.data, value.handle.dtype, value.handle.attr)
    inputs.append(core.tensor(handle, value.type))
    return inputs[-1]
